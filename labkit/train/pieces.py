"""A model's forward as a row of pieces, each of which needs nothing but what the one before it returned."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from .replicas import TrainError

__all__ = ["Piece", "graph_of", "pieces_of"]

Convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Tracer(fx.Tracer):
    """Looks into modules of the user's own and into Sequentials, but takes each layer of a Sequential as it is."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        layer = isinstance(self.root, nn.Sequential) and any(m is child for child in self.root)
        return (layer and not isinstance(m, nn.Sequential)) or super().is_leaf_module(m, module_qualified_name)


def graph_of(model: nn.Module) -> fx.Graph:
    """Return the operations of `model`'s forward and what each takes, without running it.

    Raises
    ------
    TrainError
        If its forward depends on the numbers that go through it, or has not one tensor in and one out.
    """
    name = type(model).__name__
    try:
        graph = _Tracer().trace(model)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:  # fx's own TraceError is a ValueError
        raise TrainError(
            f"the forward of {name} cannot be read as a fixed list of operations ({error}): "
            "write it as an nn.Sequential of its layers"
        ) from error
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1 or not isinstance(graph.output_node().args[0], fx.Node):
        raise TrainError(f"the forward of {name} must take one tensor and return one, and nothing else")
    return graph


class Piece:
    """A run of operations with one tensor in and one out.

    Parameters
    ----------
    model
        Whose they are; its parameters are used where they lie.
    nodes
        The operations.
    entry
        What came before the first.

    Attributes
    ----------
    name
        Its operations.
    parameters, buffers
        Those of the model that it uses, by their names there.
    shape, dtype
        Of what it returns for one sample.
    cost
        Multiplications for one sample, roughly.
    """

    def __init__(self, model: nn.Module, nodes: list[fx.Node], entry: fx.Node) -> None:
        self.name = ", ".join(node.name for node in nodes if node.op != "get_attr")
        self.shape: torch.Size = torch.Size()
        self.dtype = torch.float32
        self.cost = 0
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self._operations = [(node, _function(model, node)) for node in nodes]
        self._entry, self._exit = entry, nodes[-1]
        for node in nodes:
            if node.op == "call_module":
                module, prefix = model.get_submodule(str(node.target)), f"{node.target}."
                self.parameters |= {prefix + name: p for name, p in module.named_parameters()}
                self.buffers |= {prefix + name: b for name, b in module.named_buffers()}
            elif node.op == "get_attr":
                tensor = operator.attrgetter(str(node.target))(model)
                found = self.parameters if isinstance(tensor, nn.Parameter) else self.buffers
                found[str(node.target)] = tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Compute this part of the model's forward."""
        values: dict[fx.Node, Any] = {self._entry: x}
        for node, function in self._operations:
            values[node] = function(
                *fx.node.map_arg(node.args, values.__getitem__), **fx.node.map_arg(node.kwargs, values.__getitem__)
            )
        result: Tensor = values[self._exit]
        return result


def pieces_of(model: nn.Module, sample: Tensor) -> list[Piece]:
    """Cut the forward of `model` wherever a single tensor, a row a sample, carries all that is still needed.

    Parameters
    ----------
    model
        Its forward is read once: what depends on ``self.training`` outside of its layers stays as it is now.
    sample
        One sample as `model` takes it, of shape 1×…. It goes through the model, which is not changed.

    Returns
    -------
    list of Piece
        One after the other they compute what `model` does.

    Raises
    ------
    TrainError
        If its forward cannot be read (see `graph_of`).
    """
    graph = graph_of(model)
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    entry = next(node for node in graph.nodes if node.op == "placeholder")
    ends = _single_values(nodes, entry)
    found: list[Piece] = []
    run: list[fx.Node] = []
    two, three = (torch.cat([sample] * n) for n in (2, 3))
    with _quietly(model), _counted(model) as count:
        for node in nodes:
            run.append(node)
            if node not in ends:
                continue
            # A parameter that is used by itself is fetched by each piece that needs it.
            fetched = {used: None for each in run for used in each.all_input_nodes if used.op == "get_attr"}
            piece = Piece(model, [*fetched, *run], entry)
            count.clear()
            of_three = piece(three)
            count.clear()
            of_two = piece(two)
            if node is not nodes[-1] and not (_is_batch(of_two, 2) and of_three.shape == (3, *of_two.shape[1:])):
                continue  # what passes here is no batch of numbers: go on to where it is one
            piece.shape, piece.dtype = of_two.shape[1:], of_two.dtype
            piece.cost = (sum(count) + of_two.numel()) // 2
            found.append(piece)
            two, three, entry, run = of_two, of_three, node, []
    return found


def _single_values(nodes: list[fx.Node], entry: fx.Node) -> set[fx.Node]:
    """The operations after which nothing but their result is still needed."""
    place = {node: number for number, node in enumerate((entry, *nodes))}
    last_use = {node: max((place.get(user, len(place)) for user in node.users), default=place[node]) for node in place}
    return {
        node
        for node in nodes
        if [other for other in last_use if place[other] <= place[node] < last_use[other]] == [node]
    }


def _function(model: nn.Module, node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    if node.op == "call_method":
        return functools.partial(_call_method, str(node.target))
    if node.op == "get_attr":
        return functools.partial(operator.attrgetter(str(node.target)), model)
    assert callable(node.target)
    return node.target


def _call_method(name: str, thing: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(thing, name)(*args, **kwargs)


def _is_batch(value: Any, n: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0 and value.shape[0] == n


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """Nothing that runs here leaves a trace in the model or in the random numbers."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _counted(model: nn.Module) -> Iterator[list[int]]:
    """Collect the multiplications of each layer that runs here; those of layers unknown as one a parameter."""
    counts: list[int] = []

    def count(layer: nn.Module, _: Any, output: Any) -> None:
        if isinstance(layer, nn.Linear):
            counts.append(output.numel() * layer.in_features)
        elif isinstance(layer, Convolution):
            counts.append(output.numel() * layer.weight[0].numel())
        elif not any(True for _ in layer.children()):
            counts.append(sum(parameter.numel() for parameter in layer.parameters()))

    hooks = [layer.register_forward_hook(count) for layer in model.modules()]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()
