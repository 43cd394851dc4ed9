"""The update benchmark's master applies every gradient that its workers send, and lets all of them go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labkit import comm
from labkit.bench.update_ranks import FEWEST_UPDATES, WAYS, Plan, _master, _serve, _work


@pytest.mark.parametrize("way", WAYS)
def test_every_gradient_is_applied_and_every_worker_stops(way: str) -> None:
    model = nn.Linear(40, 30)
    plan = Plan(comm.size - 1, sum(parameter.numel() for parameter in model.parameters()), 0.0)
    if comm.rank > 0:
        comm.all_gather_object(_work(plan))
        return
    applied = []
    before = model.weight.detach().clone()
    master = _master(model, way)
    served = _serve(plan, master._replace(apply=lambda: applied.append(master.apply())), 0.0)
    sent = comm.all_gather_object(0)
    assert len(applied) == sum(sent) > FEWEST_UPDATES and all(sent[1:])
    assert served.updates_per_s > 0 and served.service_s > 0
    # Adam's step is the learning rate, whatever the gradient, which is always the same.
    assert torch.allclose(before - model.weight.detach(), torch.full((30, 40), 1e-3 * len(applied)), atol=1e-4)
