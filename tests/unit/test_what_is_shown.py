"""What a user is shown of errors and stacks: the cell's own lines, not the machinery around them."""

from __future__ import annotations

from labkit.cluster.cells import RankFailure, without_own_frames
from labkit.cluster.stacks import Stacks

CELL = "Cell In[3], line 2\n----> 2 check(shift)"
CHECK = "File /x/labkit/exercises/__init__.py:70, in check(program, exercises)\n---> 70 program(1)"
COLLECTIVE = "File /x/labkit/comm/collectives.py:23, in barrier(group)\n---> 23 collective()"
ERROR = "MismatchError: the ranks are not in the same call"


def test_a_traceback_leaves_out_the_check_of_an_exercise_and_labkits_own_frames() -> None:
    whole = "\n\n".join([CELL, CHECK, COLLECTIVE, ERROR])
    assert without_own_frames("MismatchError", whole) == "\n\n".join([CELL, ERROR])
    assert without_own_frames("TypeError", whole) == "\n\n".join([CELL, COLLECTIVE, ERROR])


def test_a_failure_that_only_follows_a_ranks_death_is_told_from_one_of_its_own() -> None:
    assert RankFailure(0, "CommError", "rank 0, barrier: rank 1 gave up", "").follows
    assert RankFailure(0, "RevokedError", "rank 0, Allreduce: communicator was revoked", "").follows
    assert RankFailure(0, "Exception", "MPI_ERR_PROC_FAILED: Process Failure", "").follows
    assert not RankFailure(0, "ValueError", "boom", "").follows
    assert not RankFailure(0, "MismatchError", "the ranks are not in the same call", "").follows


def test_the_first_line_of_a_message_stands_for_it() -> None:
    assert str(RankFailure(1, "MismatchError", "not in the same call:\n  rank 0  barrier()", "")) == (
        "MismatchError: not in the same call"
    )


def test_a_stack_shows_the_cells_lines_and_not_what_runs_them() -> None:
    lines = [
        '  File "/venv/ipykernel/ipkernel.py", line 9, in do_execute\n    run()\n',
        '  File "/tmp/ipykernel_77/12345.py", line 3, in <module>\n    step()\n',
        '  File "/home/me/mine.py", line 8, in step\n    comm.barrier()\n',
        '  File "/venv/labkit/comm/collectives.py", line 23, in barrier\n    collective()\n',
    ]
    assert repr(Stacks({0: lines, 1: [], 2: None})).splitlines() == [
        "rank 0",
        "  cell, line 3, in <module>",
        "    step()",
        '  File "/home/me/mine.py", line 8, in step',
        "    comm.barrier()",
        "rank 1",
        "  at its prompt",
        "rank 2",
        "  does not answer: it is stopped, gone, or in C code that lets nothing else run",
    ]
