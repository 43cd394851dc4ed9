"""Elastic training in a lab: a rank is killed in mid-epoch, the others finish the cell, and it is taken back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import labkit
from labkit.cluster.cells import CellError
from labkit.cluster.implementations import find
from labkit.cluster.lab import Lab

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not find().ulfm, reason="only an MPI with ULFM survives the death of a rank"),
]

SAMPLES, STEPS = 400, 10
SETUP = """
import os, signal
from pathlib import Path
import torch
from labkit import comm, data, train

digits = data.load("digits", size=400)
torch.manual_seed(0)
model = train.LeNet()
state = train.ElasticState()

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

# A file of what this process did: the samples of each forward ("f"), and each update ("u"). Known by their pixels.
order = {image.numpy().tobytes(): number for number, image in enumerate(digits.train.batch(slice(None))[0])}
assert len(order) == len(digits.train)
diary = None

class Watched(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, images):
        if diary and self.training:
            print("f", *(order[image.numpy().tobytes()] for image in images), file=diary, flush=True)
        return self.inner(images)

class SGD(train.SGD):
    updates, dies_at = 0, None

    def step(self):
        self.updates += 1
        if self.updates == self.dies_at:
            killed()
        super().step()
        if diary:
            print("u", file=diary, flush=True)

def trained(model, epochs=1, resume=None, dies_at=None):
    def optimizer(parameters):
        made = SGD(parameters, 0.05, 0.9)
        made.dies_at = dies_at
        return made
    return train.elastic(model, digits, epochs=epochs, batch_size=-(-40 // comm.size), optimizer=optimizer,
                         resume=resume, progress=False)

def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
"""
NASTY = {
    "while the optimizer steps": "dies_at = 4 if comm.rank == 1 else None",
    "in the middle of an all-reduce": """
dies_at, calls = None, [0]
from labkit.comm import shared
fold = shared._fold
def dying(*parts):
    calls[0] += 1
    if calls[0] == 9:  # two all-reduces a step
        killed()
    fold(*parts)
if comm.rank == 1:
    shared._fold = dying
""",
    "while it is rank 0 and tests the epoch": """
dies_at = None
import sys
if comm.rank == 0:
    sys.modules["labkit.train.elastic"].validate_shared = lambda *_: killed()
""",
}


def counted(folder: Path) -> Counter[int]:
    """How often each sample was in an update that counts.

    All ranks make the same attempts, each with a forward. An attempt counts when some rank updated its weights; it
    then has the samples of all ranks that made it, such as those of one that died before its own update.
    """
    diaries = []
    for path in folder.iterdir():
        attempts: list[tuple[list[int], bool]] = []
        for line in path.read_text().splitlines():
            kind, *samples = line.split()
            if kind == "f":
                attempts.append(([int(sample) for sample in samples], False))
            else:
                attempts[-1] = attempts[-1][0], True
        diaries.append(attempts)
    seen: Counter[int] = Counter()
    for at in range(max(map(len, diaries))):
        made = [attempts[at] for attempts in diaries if at < len(attempts)]
        if any(updated for _, updated in made):
            seen.update(sample for samples, _ in made for sample in samples)
    return seen


@pytest.mark.parametrize("moment", NASTY)
def test_a_rank_killed_in_mid_epoch_costs_no_step_and_no_sample_and_is_taken_back(
    lab: Lab, moment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run(SETUP, setup=True)
    lab.run("undisturbed = train.LeNet()\nundisturbed.load_state_dict(model.state_dict())\nbase = trained(undisturbed)")
    lab.run(f"diary = open('{tmp_path}/' + str(mpi_rank), 'w'); model = Watched(model)\n{NASTY[moment]}")
    lab.run("history = trained(model, resume=state, dies_at=dies_at)")
    assert "died, the others went on; lab.heal() starts it again" in capsys.readouterr().out
    dead = 0 if "rank 0" in moment else 1
    left = [rank for rank in range(3) if rank != dead]
    assert [rank for rank, row in enumerate(lab.status()) if row.state == "gone"] == [dead]

    assert lab.pull("(state.done, state.tested, len(history.steps))", left) == [(STEPS, 1, STEPS)] * 2
    changes = lab.pull("[(c['ranks'], c['lost']) for c in history.changes]", left)
    assert changes == [[([0, 1, 2], []), (left, [dead])]] * 2
    assert lab.pull("history.epochs[-1].replica_difference", left) == [0.0] * 2
    first, second = lab.pull("weights(model).numpy().tobytes()", left)
    assert first == second
    assert max(lab.pull("float((weights(model) - weights(undisturbed)).abs().max())", left)) < 1e-5
    rows = lab.pull("(base.epochs[-1].test_accuracy, history.epochs[-1].test_accuracy)", left)
    assert all(abs(undisturbed - survived) < 0.01 for undisturbed, survived in rows)
    assert counted(tmp_path) == Counter(range(SAMPLES))

    assert lab.heal() == [dead]
    lab.run("diary = None\nif not isinstance(model, Watched): model = Watched(model)")
    lab.run("history = trained(model, epochs=2, resume=state)")
    assert (
        lab.pull("(state.done, history.changes[-1]['ranks'], len(history.steps))")
        == [(2 * STEPS, [0, 1, 2], STEPS)] * 3
    )
    assert len(set(lab.pull("weights(model).numpy().tobytes()"))) == 1
    assert lab.pull("history.epochs[-1].replica_difference") == [0.0] * 3


def test_a_death_outside_elastic_training_ends_the_cell_as_ever(lab: Lab) -> None:
    lab.run(SETUP)
    with pytest.raises(CellError) as caught:
        lab.run("trained(model)\nif comm.rank == 1: killed()\ncomm.barrier()", show=False)
    assert caught.value.first is not None and caught.value.first.rank == 1


def test_two_ranks_of_four_are_killed_at_the_same_step_and_both_come_back() -> None:
    with labkit.start(4) as lab:
        lab.run(SETUP)
        deaths, left = {0: 4, 2: 4}, [1, 3]
        lab.run(f"history = trained(model, resume=state, dies_at={deaths}.get(comm.rank))")
        told = lab.pull("(state.done, history.changes[0]['ranks'], history.changes[-1]['ranks'])", left)
        assert told == [(STEPS, [0, 1, 2, 3], left)] * 2
        assert len(set(lab.pull("weights(model).numpy().tobytes()", left))) == 1
        assert lab.heal() == list(deaths)
        lab.run(SETUP, list(deaths))
        lab.run("history = trained(model, epochs=2, resume=state)")
        assert lab.pull("(state.done, history.changes[-1]['ranks'])") == [(2 * STEPS, [0, 1, 2, 3])] * 4
        assert len(set(lab.pull("weights(model).numpy().tobytes()"))) == 1
