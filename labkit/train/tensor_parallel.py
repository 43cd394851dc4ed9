"""Tensor parallelism: every rank works on all samples, with its part of each layer.

The opposite of replicas, where every rank has all layers and a part of the samples. A layer's weights, their gradients
and the optimizer's state are spread over the ranks; what the ranks exchange are the layers' outputs, at every step and
more of it the larger the batch.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from labkit.data import Batch, DatasetLike, as_dataset

from .batch_size import choose_batch_size
from .history import History
from .loop import Run
from .methods import method
from .pieces import graph_of
from .ranks import CommonFeed, Ranks, ranks_of, whole_feed
from .replicas import TrainError, agree, shapes
from .settings import SettingError, Settings
from .split_linear import ColumnLinear, RowLinear, SplitLinear
from .synchronous import sync_initial_weights
from .validator import Validator

__all__ = ["STYLES", "load_whole_state_dict", "split_layers", "tensor_parallel", "whole_state_dict"]

STYLES = ("pairs", "stacked")
"""Ways to split a model's layers."""

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ELU,
    nn.GELU,
    nn.Identity,
    nn.LeakyReLU,
    nn.ReLU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)
ELEMENTWISE_FUNCTIONS: tuple[Any, ...] = (
    *(functional.elu, functional.gelu, functional.leaky_relu, functional.relu, functional.silu, functional.softplus),
    *(functional.sigmoid, functional.tanh, torch.relu, torch.sigmoid, torch.tanh),
)
ELEMENTWISE_METHODS = ("relu", "sigmoid", "tanh")
"""Functions of single numbers, which each rank can apply to its own columns. Dropout is none: its random numbers must
be the same on all ranks, so it comes where all of them have all columns."""


def split_layers(model: nn.Module, over: Ranks | None = None, style: str = "pairs") -> nn.Module:
    """Return `model` with its `torch.nn.Linear` layers split over the ranks; what it computes stays the same.

    Parameters
    ----------
    model
        The same on all ranks; it is not changed. Its other layers are whole on every rank of the result, as are
        layers that share their weights with others.
    over
        The ranks; default: all.
    style
        ``"stacked"``: each layer's outputs are put together after it, whatever comes next. ``"pairs"``: where a layer
        follows upon another with functions of single numbers between them, the first passes its columns on and the
        second adds up (see `labkit.train.split_linear`); the others are stacked.

    Raises
    ------
    TrainError
        If there is no layer to split.
    """
    if style not in STYLES:
        raise SettingError(f'style must be "pairs" or "stacked", not {style!r}')
    over = over or ranks_of(None, "tensor")
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and all(uses[id(p)] == 1 for p in layer.parameters())
    }
    if not layers:
        raise TrainError(f"{type(model).__name__} has no nn.Linear layer of its own weights that could be split")
    pairs = _pairs(model, layers) if style == "pairs" else {}
    split: dict[int, Any] = {}
    for name, layer in layers.items():
        if name in pairs.values():
            split[id(layer)] = RowLinear(layer, over)
        else:
            split[id(layer)] = ColumnLinear(layer, over, stacked=name not in pairs)
    # What deepcopy takes for copied already stands in the copy in place of the original.
    copied: nn.Module = copy.deepcopy(model, split)
    return copied


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of the whole model of which `split_layers` made `model`; all ranks call it together."""
    state = dict(model.state_dict())
    for prefix, layer in _split_layers_of(model):
        state |= {prefix + name: tensor for name, tensor in layer.whole().items()}
    return state


def load_whole_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give `model`, made by `split_layers`, its parts of a whole model's state."""
    mine = dict(state)
    for prefix, layer in _split_layers_of(model):
        mine |= {prefix + name: layer.part(name, state[prefix + name]) for name, _ in layer.named_parameters()}
    model.load_state_dict(mine)


def _split_layers_of(model: nn.Module) -> list[tuple[str, SplitLinear]]:
    return [
        (f"{name}." if name else "", layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, SplitLinear)
    ]


def _pairs(model: nn.Module, layers: dict[str, nn.Linear]) -> dict[str, str]:
    """Which layer passes its columns on to which, by their names."""
    try:
        graph = graph_of(model)
    except TrainError:
        return {}  # nobody can tell what comes between the layers
    used = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    pairs: dict[str, str] = {}
    for node in graph.nodes:
        first = _layer(node, layers, used)
        if first is None or first in pairs.values():
            continue
        following = _only_user(node)
        while following is not None and _is_elementwise(following, model):
            following = _only_user(following)
        second = None if following is None else _layer(following, layers, used)
        if second is not None:
            pairs[first] = second
    return pairs


def _layer(node: fx.Node, layers: dict[str, nn.Linear], used: Counter[str]) -> str | None:
    name = str(node.target)
    return name if node.op == "call_module" and name in layers and used[name] == 1 else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_elementwise(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), ELEMENTWISE)
    if node.op == "call_method":
        return node.target in ELEMENTWISE_METHODS
    return node.op == "call_function" and node.target in ELEMENTWISE_FUNCTIONS


@method("tensor")
def tensor_parallel(model: nn.Module, dataset: DatasetLike, *, style: str = "pairs", **settings: Any) -> History:
    """Train `model` with its linear layers split over the ranks; all ranks call it alike.

    R ranks with batch size B take the same steps as one rank with R·B: all work on the R·B samples of a step, and
    each counts B of them as its own. Optimizers that treat each number by itself (SGD, Adam) compute what they do on
    a whole model; one that takes a layer's norm sees its parts.

    Parameters
    ----------
    model
        The same on all ranks; changed in place and moved to the device. It gets rank 0's weights before the first
        epoch, and after each what the ranks have learnt, put together.
    dataset
        The same on all ranks.
    style
        How layers are split: see `split_layers`.
    **settings
        ``epochs``, ``batch_size``, ``lr``, ``momentum``, ``optimizer`` and the others of `labkit.train.Settings`.

    Returns
    -------
    History
        Times and losses by step, results by epoch. A rank's loss is that of all samples of the step.

    Raises
    ------
    SettingError, TypeError
        For a setting that makes no sense, or that there is not.
    TrainError
        On all ranks, when they were called with different things or there is nothing to split.
    KeyboardInterrupt
        When interrupted; the model has the weights of the last epoch that ended.
    """
    common, dataset = Settings.of("tensor", settings, ["style"]), as_dataset(dataset)
    over = ranks_of(common.transport, "tensor")
    agree(over, {"model": shapes(model)})  # or some might find a layer to split, and others none
    device = common.choose_device()
    model.to(device)
    # On the whole model: a rank that tried a batch size on a split one would wait for ranks that try another.
    common = replace(common, batch_size=choose_batch_size(common, model, dataset, device, over))
    split = split_layers(model, over, style)
    run = Run("tensor", split, dataset, common, {"model": shapes(model), "style": style})
    run.validator = Validator(common.validate, model, run.test, run.criterion, run.over, together=True)
    with run:
        sync_initial_weights(model, over)
        load_whole_state_dict(split, model.state_dict())
        torch.manual_seed(common.seed)  # dropout leaves out the same units on all ranks: they have the same samples
        feed = run.feed = CommonFeed(whole_feed(run), over.rank, over.size)
        outputs: list[Tensor] = []

        def forward(images: Tensor) -> Tensor:
            outputs[:] = [split(images)]
            return outputs[0]

        def step(batch: Batch) -> tuple[float, int]:
            for parameter in split.parameters():
                parameter.grad = None
            # On a GPU, too, backward runs in this thread, which alone may communicate.
            with torch.autograd.set_multithreading_enabled(False):
                loss, _ = run.forward_and_backward(feed.whole, forward)
            run.optim.step()
            mine = outputs[0][feed.share(len(feed.whole.labels))]
            return loss, int((mine.argmax(1) == batch.labels).sum())

        def put_together() -> None:
            model.load_state_dict(whole_state_dict(split))

        run.in_step(step, after_steps=put_together, after_restore=put_together)
    return run.history
