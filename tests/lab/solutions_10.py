"""The two programs of notebook 10, repaired: one way each."""

from __future__ import annotations

SOLUTIONS = {
    "part": """
def part(n):
    each, left = divmod(n, comm.size)
    first = comm.rank * each + min(comm.rank, left)
    return list(range(first, first + each + (comm.rank < left)))
""",
    "hand_out": """
def hand_out(pieces):
    done, number = [], torch.zeros(1)
    if comm.rank == 0:
        for piece in [*range(pieces), *[-1] * (comm.size - 1)]:
            worker = comm.recv(number).src
            comm.send(torch.tensor([float(piece)]), dst=worker)
    while comm.rank > 0:
        comm.send(number, dst=0)
        comm.recv(number, src=0)
        if number < 0:
            break
        done.append(int(number))
    return sorted(piece for each in comm.all_gather_object(done) for piece in each)
""",
}
