# Sourced by the scripts beside it: the project's own virtual environment, made once and then reused.
#
#   PYTHON                  interpreter to build it with (default: the first of python3, python3.13 .. python3.10 that fits)
#   PLAID_TILEMAXSIM_VENV   its folder (default: .venv in the checkout)
#   PLAID_TILEMAXSIM_TORCH  cpu | gpu (default: gpu where nvidia-smi lists a device)
#
# Nothing outside that folder is installed or changed. shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${PLAID_TILEMAXSIM_VENV:-$root/.venv}
torch_version=$(sed -n 's/^torch==//p' "$root/constraints/cpu.txt")

say() { printf '\n==> %s\n' "$*"; }
note() { printf '    %s\n' "$@"; }
die() {
    printf '\nerror: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '       %s\n' "$@" >&2
    exit 1
}

find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.10)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            python=$candidate
            return
        fi
    done
    die "expected Python 3.10 to 3.13${PYTHON:+ as PYTHON=$PYTHON}, found $(python3 --version 2>&1 || true)." \
        "Get one: apt-get install python3 python3-venv | dnf install python3.12 | brew install python@3.12" \
        "Then run this again, or name it: PYTHON=/path/to/python3.12 bash $0"
}

digest() {
    {
        cat "$root/setup.cfg" "$root"/constraints/*.txt "$root/scripts/_venv.sh"
        "$python" -c 'import sys; print(sys.version, sys.base_prefix)'
        printf '%s\n' "$root" "$torch"
    } | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# Debian ships python3 without ensurepip unless python3-venv is installed; pip alone can fill a bare environment.
make_venv() {
    rm -rf "$venv"
    local flags=("$@")
    "$python" -m venv "${flags[@]}" "$venv" >"$log" 2>&1 && return
    rm -rf "$venv"
    if "$python" -m venv --without-pip "${flags[@]}" "$venv" >>"$log" 2>&1 &&
        "$python" -m pip --python "$venv/bin/python" install pip >>"$log" 2>&1; then
        return
    fi
    cat "$log" >&2
    die "$python could make no virtual environment in $venv." \
        "Get the module: apt-get install python3-venv (Debian, Ubuntu), or use another interpreter: PYTHON=..."
}

pip_install() {
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check)
    if [ -t 1 ]; then
        "${pip[@]}" "$@" && return # with its progress bars
    else
        "${pip[@]}" "$@" >"$log" 2>&1 && return
        tail -n 25 "$log" >&2
    fi
    die "pip install $* failed; its output is above." \
        "Without network: check that 'python3 -m pip download tqdm' works; behind a proxy set HTTPS_PROXY, with a" \
        "mirror set PIP_INDEX_URL. 'No space left': set PLAID_TILEMAXSIM_VENV and TMPDIR to a larger disk."
}

# PyPI's torch for Linux is the CUDA build with gigabytes of libraries: without a GPU ask for the CPU build by name.
install_torch_cpu() {
    if [ "$(uname -s)" != Linux ]; then
        pip_install "torch==$torch_version"
        return
    fi
    local wanted="torch==$torch_version+cpu" index
    for index in "" "--extra-index-url=https://download.pytorch.org/whl/cpu"; do
        if "$venv/bin/python" -m pip install --dry-run --no-deps ${index:+"$index"} "$wanted" >"$log" 2>&1; then
            pip_install ${index:+"$index"} "$wanted"
            return
        fi
    done
    note "The CPU build $wanted is not to be had from here; installing torch==$torch_version as PyPI has it" \
        "(with CUDA libraries: some gigabytes, a few minutes)."
    pip_install "torch==$torch_version"
}

install_all() {
    local extras=$torch,eval,dev,docs constraint=$venv/constraints.txt
    if [ "$torch" = cpu ]; then
        note "torch $torch_version, CPU build"
        install_torch_cpu
    elif [ -n "$own_torch" ]; then
        note "torch $own_torch of $python is kept and used"
    else
        note "torch $torch_version, CUDA build"
        pip_install "torch==$torch_version"
    fi
    # torch and a triton that came with it belong together: hold both where they are. A CPU build comes without.
    {
        printf -- '-c %s\n' "$root/constraints/tested.txt"
        "$venv/bin/python" -c '
from importlib.metadata import distributions
held = {d.name: d.version for d in distributions() if d.name in ("torch", "triton")}
print("\n".join(f"{name}=={version}" for name, version in held.items()))'
        "$venv/bin/python" -m pip show -q triton 2>/dev/null || grep '^triton==' "$root/constraints/cpu.txt"
    } >"$constraint"
    note "plaid-tilemaxsim[$extras] and what it needs"
    pip_install -c "$constraint" -e "$root[$extras]"
}

# Puts an environment with the project installed first on PATH.
enter_venv() {
    find_python
    torch=${PLAID_TILEMAXSIM_TORCH:-}
    if [ -z "$torch" ]; then
        torch=cpu
        if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then torch=gpu; fi
    fi
    case $torch in cpu | gpu) ;; *) die "PLAID_TILEMAXSIM_TORCH: expected cpu or gpu, got '$torch'." ;; esac
    log=$(mktemp "${TMPDIR:-/tmp}/plaid-tilemaxsim-pip.XXXXXX")
    local stamp=$venv/.digest now
    now=$(digest)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$now" ]; then
        if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
            die "PLAID_TILEMAXSIM_VENV=$venv exists and is no virtual environment." "Name another folder."
        fi
        say "Installing into $venv ($("$python" --version), torch for $torch; once, a few minutes)"
        own_torch=
        if [ "$torch" = gpu ]; then
            own_torch=$("$python" -c '
import torch
if torch.cuda.is_available() and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6):
    print(torch.__version__)' 2>/dev/null || true)
        fi
        if [ -n "$own_torch" ]; then make_venv --system-site-packages; else make_venv; fi
        install_all
        printf '%s\n' "$now" >"$stamp"
    fi
    rm -f "$log"
    export PATH="$venv/bin:$PATH" VIRTUAL_ENV=$venv
    # Stock PLAID compiles C++ extensions: kept with the environment whose torch and compiler they are built for.
    export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$venv/torch_extensions}
}

# Stock PLAID on CPU compiles four extensions, one after the other, when first used. Starts all of them at once in the
# background; wait_for_extensions waits. Without a compiler says so and starts nothing.
start_extensions() {
    extensions_pid=
    [ "$torch" = cpu ] || return 0
    local built=$TORCH_EXTENSIONS_DIR/.built
    [ ! -e "$built" ] || return 0
    local missing
    missing=$(python -c '
import os, shutil, sysconfig
if not shutil.which(os.environ.get("CXX", "c++")):
    print("a C++ compiler (apt-get install g++ | dnf install gcc-c++ | xcode-select --install)")
elif not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("the header Python.h (apt-get install python3-dev | dnf install python3-devel)")')
    if [ -n "$missing" ]; then
        die "stock PLAID compiles its CPU search and this machine lacks $missing." "Install it and run this again."
    fi
    mkdir -p "$TORCH_EXTENSIONS_DIR"
    extensions_log=$TORCH_EXTENSIONS_DIR/build.log
    # A build that was killed leaves a lock on which the next one would wait for ever.
    find "$TORCH_EXTENSIONS_DIR" -name lock -delete
    say "Compiling stock PLAID's CPU extensions in the background (once, one to three minutes)"
    python "$root/scripts/_extensions.py" >"$extensions_log" 2>&1 &
    extensions_pid=$!
}

wait_for_extensions() {
    [ -n "$extensions_pid" ] || return 0
    if kill -0 "$extensions_pid" 2>/dev/null; then say "Waiting for the compiler"; fi
    if ! wait "$extensions_pid"; then
        tail -n 25 "$extensions_log" >&2
        die "stock PLAID's CPU extensions did not compile; the end of the output is above, all of it in" \
            "$extensions_log" "A working C++ compiler with C++17 and the headers of $(python --version) are needed."
    fi
    extensions_pid=
    touch "$TORCH_EXTENSIONS_DIR/.built"
}

# For the callers' EXIT trap: a build left running would hold its locks.
stop_extensions() {
    [ -n "${extensions_pid:-}" ] || return 0
    kill "$extensions_pid" 2>/dev/null || true
    find "$TORCH_EXTENSIONS_DIR" -name lock -delete
}
