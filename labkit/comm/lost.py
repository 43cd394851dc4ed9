"""What a call says that MPI itself has ended: which rank is lost, if one is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.comm.errors import CommError, RankDiedError
from labkit.comm.mpi import MPI, REVOKES
from labkit.comm.waiting import place

if TYPE_CHECKING:
    from labkit.comm.communicator import Communicator

__all__ = ["died", "fault", "gone"]

_LOST = {getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING")} - {None}


def gone(group: Communicator) -> list[int]:
    """Ranks of the group whose processes have ended, as far as this rank has heard."""
    if not REVOKES:  # such an MPI ends all ranks when one dies
        return []
    failed = group.private.Get_failed()
    ranks = MPI.Group.Translate_ranks(failed, list(range(failed.size)), group.private.Get_group())
    return sorted(int(rank) for rank in ranks)


def died(group: Communicator, operation: str, lost: list[int], where: str) -> RankDiedError:
    """The error for `operation`, which needs the ranks `lost`."""
    who = f"rank {lost[0]} has" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} have"
    return RankDiedError(
        f"{group.who(operation)}: the process of {who} ended ({where}). Cure: in the notebook lab.heal() starts it "
        "again, lab.shrink() goes on without it.",
        lost,
    )


def fault(group: Communicator, operation: str, error: MPI.Exception, text: str = "") -> CommError:
    """The error for `operation`, written out as `text`, that MPI ended with `error`."""
    where = f"in {text}, {place()}" if text else place()
    lost = gone(group) if error.Get_error_class() in _LOST else []
    if lost:
        return died(group, operation, lost, where)
    return CommError(
        f"{group.who(operation)}: MPI reports: {error.Get_error_string()} ({where}). Run comm.renew() on every rank."
    )
