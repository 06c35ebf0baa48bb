"""Converts nested plain data with tensors for a file, to JSON for the manifest and named tensors, and back.

It is not pickle: reading any file gives only numbers, strings, tensors and containers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

#: A JSON object with this key is a value that JSON does not have.
_KIND = "$"


class Packer:
    """Separates data into JSON and tensors. Tensors that share their memory are written once.

    Attributes:
        tensors: tensors found so far, by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def pack(self, data: Any, where: str) -> Any:
        """Return data as JSON; their tensors are added to :attr:`tensors`, with ``where`` as prefix of their names.

        Raises:
            TypeError: they are not numbers, strings, None, tensors, or lists, tuples, dictionaries and counters of
                these; the text says where.
        """
        if data is None or isinstance(data, bool | int | float | str):
            return data
        if isinstance(data, np.generic):
            return self.pack(data.item(), where)
        if isinstance(data, torch.Tensor):
            return {_KIND: "tensor", "name": self._name_of(data, where)}
        if isinstance(data, list | tuple):
            items = [self.pack(one, f"{where}/{index}") for index, one in enumerate(data)]
            return items if isinstance(data, list) else {_KIND: "tuple", "items": items}
        if isinstance(data, Mapping):
            return self._pack_mapping(data, where)
        raise TypeError(
            f"{where} is {type(data).__name__}; a checkpoint holds numbers, strings, tensors, and lists, tuples and "
            "dictionaries of them. Give the state of an object (its state_dict()) instead of the object"
        )

    def _pack_mapping(self, data: Mapping[Any, Any], where: str) -> Any:
        if not all(isinstance(key, int | str) and not isinstance(key, bool) for key in data):
            raise TypeError(f"{where} has a key that is neither int nor str")
        packed = [(key, self.pack(one, f"{where}/{key}")) for key, one in data.items()]
        if isinstance(data, Counter):
            return {_KIND: "counter", "items": packed}
        if all(isinstance(key, str) for key in data) and _KIND not in data:
            return dict(packed)
        return {_KIND: "dict", "items": packed}

    def _name_of(self, tensor: torch.Tensor, where: str) -> str:
        place = (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if tensor.layout == torch.strided and tensor.numel() and place in self._names:
            return self._names[place]
        name = where
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor
        if tensor.layout == torch.strided:
            self._names[place] = name
        return name


def unpack(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the data that a :class:`Packer` has converted."""
    if isinstance(data, list):
        return [unpack(one, tensors) for one in data]
    if not isinstance(data, dict):
        return data
    kind = data.get(_KIND)
    if kind is None:
        return {key: unpack(one, tensors) for key, one in data.items()}
    if kind == "tensor":
        return tensors[data["name"]]
    if kind == "tuple":
        return tuple(unpack(one, tensors) for one in data["items"])
    items = {key: unpack(one, tensors) for key, one in data["items"]}
    return Counter(items) if kind == "counter" else items
