"""Recording CUDA graphs beside what else a process holds and lets go of."""

import gc
import threading

import pytest
import torch

from plaid_tilemaxsim.graphs import empty_cache, recording

pytestmark = pytest.mark.gpu


def add_one(x: torch.Tensor, pool: object) -> torch.cuda.CUDAGraph:
    with recording(x.device, pool) as graph:
        x.add_(1)
    return graph


def test_lost_graphs_are_not_collected_in_the_middle_of_a_recording():
    """A cycle that holds a graph is garbage that only a collection finds, and many new objects start one."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(4, device=device)
    x.add_(1).mul_(2)
    lost: list[object] = [add_one(x, torch.cuda.graph_pool_handle()), torch.ones(1 << 20, device=device)]
    lost.append(lost)
    del lost
    pool = torch.cuda.graph_pool_handle()
    with recording(device, pool) as graph:
        assert not gc.isenabled()
        new = [[i] for i in range(1_000_000)]
        x.mul_(2)
    assert gc.isenabled()
    assert len(new) == 1_000_000
    before = x.clone()
    graph.replay()
    assert torch.equal(x, 2 * before)
    gc.collect()


def test_the_cache_is_emptied_between_recordings():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(4, device=device)
    x.mul_(2)
    emptied = threading.Event()

    def empty() -> None:
        empty_cache()
        emptied.set()

    with recording(device, torch.cuda.graph_pool_handle()) as graph:
        other = threading.Thread(target=empty)
        other.start()
        assert not emptied.wait(0.2)
        x.mul_(2)
    other.join()
    assert emptied.is_set()
    graph.replay()
    assert (x == 4).all()
