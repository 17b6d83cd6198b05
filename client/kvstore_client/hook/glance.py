"""A quick look at a model: has anything changed that an ordinary edit of weights or modules changes?"""

# ruff: noqa: SLF001  torch has no public name for a tensor's version, and its public walks are ten times slower
from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

PLAIN = (int, float, str, type(None))

_Tensors = list[tuple[int, int]]


class _Record(NamedTuple):
    """One module as it was: how many fields, its children, plain settings and tensors (address and version)."""

    module: torch.nn.Module
    kind: type
    fields: int
    children: tuple[torch.nn.Module | None, ...]
    settings: Callable[[dict[str, Any]], tuple[Any, ...]]
    values: tuple[Any, ...]
    parameters: _Tensors
    buffers: _Tensors
    adapter: tuple[object, ...] | None


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """All modules, each once, in a fixed order; torch's own walk takes ten times as long."""
    found: dict[int, torch.nn.Module] = {}
    waiting: list[torch.nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            children = module.__dict__["_modules"]
            if children:
                waiting.extend(children.values())
    return list(found.values())


def is_adapter(module: torch.nn.Module) -> bool:
    """Whether it is one of PEFT's layers."""
    # On the type: an attribute that a module lacks costs an exception.
    return hasattr(type(module), "active_adapter")


def adapter_state(module: Any) -> tuple[object, ...]:
    """Which adapters of a layer of PEFT take part, and how much."""
    return (
        str(module.active_adapter),
        bool(getattr(module, "disable_adapters", False)),
        # LoRA's is a number for each adapter.
        str(module.__dict__.get("scaling")),
    )


class Glance:
    """A model as it was when this was made.

    Invariant: `holds` is true only while every module is there, of the same class, with as many fields, the same
    children, equal settings of the names given, and tensors of the same addresses and versions.
    """

    def __init__(self, model: torch.nn.Module, names: dict[int, list[str]]) -> None:
        """`names` are those of each module's plain settings, by the module's id."""
        self._records = [_record(module, names.get(id(module), [])) for module in modules_of(model)]

    def holds(self) -> bool:
        """Whether nothing has changed since: some tenths of a millisecond."""
        same, tensors = operator.is_, _tensors
        for record in self._records:
            module, kind, count, children, settings, values, parameters, buffers, adapter = record
            fields = module.__dict__
            now = fields["_modules"]
            if (
                type(module) is not kind
                or len(fields) != count
                or len(now) != len(children)
                or not all(map(same, now.values(), children))
            ):
                return False
            try:
                found = settings(fields)
            except KeyError:
                return False
            # Equal numbers may be other objects, and comparing what isn't plain any more may raise.
            if not all(map(same, found, values)) and not _equal(found, values):
                return False
            own, others = fields["_parameters"], fields["_buffers"]
            if (own or parameters) and tensors(own) != parameters:
                return False
            if (others or buffers) and tensors(others) != buffers:
                return False
            if adapter is not None and adapter_state(module) != adapter:
                return False
        return True


def _record(module: torch.nn.Module, names: Sequence[str]) -> _Record:
    fields = module.__dict__
    settings = _getter(names)
    return _Record(
        module=module,
        kind=type(module),
        fields=len(fields),
        children=tuple(fields["_modules"].values()),
        settings=settings,
        values=settings(fields),
        parameters=_tensors(fields["_parameters"]),
        buffers=_tensors(fields["_buffers"]),
        adapter=adapter_state(module) if is_adapter(module) else None,
    )


def _getter(names: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Gives the fields of these names as a tuple; KeyError if one is missing."""
    if not names:
        return lambda _: ()
    if len(names) == 1:
        # itemgetter of one name gives no tuple.
        return lambda fields: (fields[names[0]],)
    return operator.itemgetter(*names)


def _tensors(group: dict[str, torch.Tensor | None]) -> _Tensors:
    return [(tensor.data_ptr(), tensor._version) for tensor in group.values() if tensor is not None]


def _equal(found: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    return all(now is then or (isinstance(now, PLAIN) and now == then) for now, then in zip(found, values, strict=True))
