"""Stock PLAID indexes: read and checked (files), laid out for the kernels (resident), sized (placement)."""
