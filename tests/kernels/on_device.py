"""Tests hold their tensors on the CPU. This lets them drive kernels on another device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvops import Backend


class OnDevice:
    """A backend whose tensors travel to `device` for each call, and back with what was written.

    Whole storages travel, so that on the device too an argument is the strided view that it was,
    and views of one tensor are views of one tensor.
    """

    def __init__(self, backend: Backend, device: str) -> None:
        self._backend = backend
        self._device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            trip = _Trip(self._device)
            result = operation(*map(trip.out, args), **{k: trip.out(v) for k, v in kwargs.items()})
            trip.back()
            return result.cpu() if isinstance(result, Tensor) else result

        return call


class _Trip:
    def __init__(self, device: str) -> None:
        self._device = device
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def out(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        home = argument.untyped_storage()
        if home.data_ptr() not in self._storages:
            room = torch.empty(home.nbytes(), dtype=torch.uint8, device=self._device)
            self._storages[home.data_ptr()] = home, room.untyped_storage().copy_(home)
        _, away = self._storages[home.data_ptr()]
        moved = torch.empty(0, dtype=argument.dtype, device=self._device)
        return moved.set_(away, argument.storage_offset(), argument.size(), argument.stride())

    def back(self) -> None:
        for home, away in self._storages.values():
            home.copy_(away)
