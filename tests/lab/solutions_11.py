"""The two programs of notebook 11, repaired: one way each."""

from __future__ import annotations

SOLUTIONS = {
    "my_share": """
def my_share(batch):
    return (comm.rank + 1) * batch // comm.size - comm.rank * batch // comm.size
""",
    "furthest": """
def furthest(updates):
    everybody = torch.zeros(comm.size, dtype=torch.int64)
    everybody[comm.rank] = updates
    comm.all_reduce(everybody)
    counts = everybody.tolist()
    return counts.index(max(counts))
""",
}
