"""The four programs of notebook 02, repaired: one way each."""

from __future__ import annotations

SOLUTIONS = {
    "shift": """
def shift(mine):
    theirs = torch.empty_like(mine)
    comm.sendrecv(mine, (comm.rank + 1) % comm.size, theirs, (comm.rank - 1) % comm.size)
    return theirs
""",
    "collect": """
def collect(mine):
    if comm.rank > 0:
        return MPI.COMM_WORLD.send(mine, dest=0)
    return sorted([mine] + [MPI.COMM_WORLD.recv() for _ in range(comm.size - 1)])
""",
    "total_loss": """
def total_loss(losses):
    total = torch.tensor([sum(losses)])
    comm.all_reduce(total)
    return total.item()
""",
    "spread": """
def spread(x):
    low, high = x.min().reshape(1), x.max().reshape(1)
    comm.all_reduce(low, op="min")
    comm.all_reduce(high, op="max")
    return (high - low).item()
""",
}
