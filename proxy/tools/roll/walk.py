"""The roll through the instances: each is restarted, or moved to another role, while the others serve."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Self

import orjson

from proxy.common.terms import format_count
from proxy.settings import SettingsError
from proxy.tools.roll.gateways import GatewayGroup, GatewayProblem, RollInstance, models_lost_without

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


_LOOK_SECONDS: Final = 0.5


class RollStopped(Exception):
    """The roll ends early. The text has the reason and the state of the fleet."""


@dataclass(frozen=True, slots=True)
class RollLimits:
    """Conditions and time limits of a roll."""

    min_serving: int | None = None
    """Number of other instances that must serve during a restart, one of them with the same model.

    None: all others that serve at the beginning, and at least one.
    """
    max_failures: int = 0
    """Number of failed requests at which the roll stops."""
    evacuate_after_seconds: float | None = None
    """Time after which remaining requests of the instance move to others; None: the gateways' setting."""
    drain_seconds: float = 3600.0
    """Limit for the requests of an instance to end."""
    ready_seconds: float = 1800.0
    """Limit for a restarted instance to serve, and for enough others to serve."""
    settle_seconds: float = 10.0
    """Pause between two instances, in which failures may appear."""


class FleetWalk(ABC):
    """Takes the instances of a fleet out of service one after the other.

    `stop` may be called at any time, also from a signal handler.
    """

    _verb: ClassVar[str]
    """What happens to each instance, for messages."""

    def __init__(
        self,
        gateways: GatewayGroup,
        progress: RollProgress,
        limits: RollLimits,
        tell: Callable[[str], None] = print,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        """Prepare the walk.

        Args:
            gateways: The gateways with the present role of the instances.
            progress: The progress so far.
            limits: Conditions and time limits.
            tell: Prints a line.
            look_seconds: Time between two looks at the gateways.
        """
        self._gateways = gateways
        self._progress = progress
        self._limits = limits
        self._tell = tell
        self._look_seconds = look_seconds
        self._is_stopping = False
        self._least = 0

    def stop(self) -> None:
        """End the roll as soon as no instance is out of service."""
        self._is_stopping = True

    def plan(self, only: Sequence[str] = ()) -> list[RollInstance]:
        """Return the instances of the walk, in order, and print those that are left out.

        Raises GatewayProblem and RollStopped. `only`: instances of the walk; empty: all.
        """
        there = self._gateways.instances()
        known = {instance.address for instance in there}
        if missing := [address for address in only if address not in known]:
            raise RollStopped(f"not all gateways have these instances: {', '.join(missing)}")
        wanted = [instance for instance in there if not only or instance.address in only]
        planned = []
        for instance in wanted:
            if instance.address in self._progress.done:
                self._tell(f"{instance.address} is left out: it was restarted before")
            elif instance.is_disabled and instance.address != self._progress.current:
                self._tell(f"{instance.address} is left out: it was disabled before this roll")
            else:
                planned.append(instance)
        # An instance that is out of service comes first, because only one may be.
        planned.sort(key=lambda instance: instance.address != self._progress.current)
        self._least = least = self._least_serving(there, planned)
        for instance in planned if least else ():
            if lost := models_lost_without(instance, (other for other in there if other is not instance)):
                models = ", ".join(sorted(lost))
                raise RollStopped(
                    f"{instance.address} is the only instance that serves {models}: "
                    f"use --min-serving 0 to {self._verb} it anyway"
                )
        return planned

    @abstractmethod
    def _least_serving(self, there: Sequence[RollInstance], planned: Sequence[RollInstance]) -> int:
        """Return the number of others that must serve. Raises RollStopped if there are too few."""

    @property
    def min_serving(self) -> int:
        """Return the number of other instances that must serve meanwhile, as determined by `plan`."""
        return self._least

    def run(self, planned: Sequence[RollInstance]) -> None:
        """Walk through all of them. Raises RollStopped, and GatewayProblem if a gateway does not answer any more."""
        self._gateways.failures()
        for number, instance in enumerate(planned, 1):
            self._tell(f"{instance.address} ({number} of {len(planned)})")
            self._walk_through(instance.address)
        self._progress.forget()

    # One instance

    def _walk_through(self, address: str) -> None:
        self._wait(lambda: self._has_enough(address), self._limits.ready_seconds, "enough other instances serve")
        self._progress.taking(address)
        self._replace(address)
        self._progress.note_done()
        until = time.monotonic() + self._limits.settle_seconds
        self._wait(lambda: time.monotonic() >= until, self._limits.settle_seconds + 60, "nothing happens")

    @abstractmethod
    def _replace(self, address: str) -> None:
        """Take an instance out of service, and wait until it serves again. Raises as `run` does."""

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str, *, may_stop: bool = True) -> None:
        """Wait until a condition holds, or its time limit has passed.

        Raises RollStopped after the limit, and when the roll should stop, if it may stop here.
        """
        until = time.monotonic() + seconds
        while True:
            if may_stop:
                self._check()
            if condition():
                return
            if time.monotonic() >= until:
                raise RollStopped(f"timed out after {seconds:g} s, waiting until {what}")
            time.sleep(self._look_seconds)

    def _check(self) -> None:
        if self._is_stopping:
            raise RollStopped("stopped by hand")
        if (failures := self._gateways.failures()) > self._limits.max_failures:
            raise RollStopped(f"clients saw {format_count(failures, 'request')} fail since the roll began")

    # Conditions

    def _has_enough(self, address: str) -> bool:
        return self._are_enough(self._gateways.instances(), address)

    def _are_enough(self, there: Sequence[RollInstance], address: str) -> bool:
        others = [instance for instance in there if instance.serves and instance.address != address]
        away = _instance_at(there, address)
        return len(others) >= self._least and (not self._least or not models_lost_without(away, others))


def _instance_at(there: Sequence[RollInstance], address: str) -> RollInstance:
    for instance in there:
        if instance.address == address:
            return instance
    raise GatewayProblem(f"{address} is no longer an instance of all gateways")


class RestartWalk(FleetWalk):
    """Restarts the instances of a fleet one after the other.

    `restart` gets an idle instance, and returns when the old process has ended and the new one will serve; it raises
    RollStopped if that fails.
    """

    _verb = "restart"

    def __init__(
        self,
        gateways: GatewayGroup,
        progress: RollProgress,
        limits: RollLimits,
        restart: Callable[[str], None],
        tell: Callable[[str], None] = print,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        super().__init__(gateways, progress, limits, tell, look_seconds)
        self._restart = restart

    def _least_serving(self, there: Sequence[RollInstance], planned: Sequence[RollInstance]) -> int:
        least = self._limits.min_serving
        if least is None:
            serving = {instance.address for instance in there if instance.serves}
            least = max(1, min((len(serving - {instance.address}) for instance in planned), default=1))
        if planned and len(there) <= least:
            raise RollStopped(f"fewer than {least} other instances would serve during a restart: lower --min-serving")
        return least

    def _replace(self, address: str) -> None:
        try:
            for warning in self._gateways.disable(address, self._limits.evacuate_after_seconds):
                self._tell(f"  {warning}")
            self._wait(lambda: self._is_idle(address), self._limits.drain_seconds, f"{address} works on nothing")
        except BaseException:
            self._put_back(address)
            raise
        began = time.monotonic()
        self._tell("  works on nothing: restarting it")
        self._restart(address)
        self._gateways.enable(address)
        self._wait(lambda: self._serves(address), self._limits.ready_seconds, f"{address} serves again", may_stop=False)
        self._tell(f"  serves again after {time.monotonic() - began:.1f} s")

    def _put_back(self, address: str) -> None:
        """Enable an instance again that was not restarted."""
        self._gateways.enable(address)
        self._progress.taking(None)
        self._tell(f"  {address} is enabled again, and was not restarted")

    def _is_idle(self, address: str) -> bool:
        there = self._gateways.instances()
        if not self._are_enough(there, address):
            raise RollStopped(f"fewer than {self._least} other instances serve, or none that serves the same")
        return _instance_at(there, address).inflight == 0

    def _serves(self, address: str) -> bool:
        return _instance_at(self._gateways.instances(), address).serves


class RoleWalk(FleetWalk):
    """Moves elastic instances to another role, one after the other, instead of restarting them."""

    _verb = "move"

    def __init__(
        self,
        gateways: GatewayGroup,
        targets: GatewayGroup,
        progress: RollProgress,
        limits: RollLimits,
        tell: Callable[[str], None] = print,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        """Prepare the walk. `targets`: the gateways with the new role."""
        super().__init__(gateways, progress, limits, tell, look_seconds)
        self._targets = targets

    def plan(self, only: Sequence[str] = ()) -> list[RollInstance]:
        """Return the instances of the walk, in order. Those that have moved before are left out."""
        moved = {instance.address for instance in self._targets.instances()}
        if self._progress.current in moved:
            self._progress.note_done()
        for address in sorted(moved.intersection(only)):
            self._tell(f"{address} is left out: it is a {self._targets.role} instance already")
        remaining = [address for address in only if address not in moved]
        planned = [] if only and not remaining else super().plan(remaining)
        for instance in planned:
            if not instance.is_elastic:
                raise RollStopped(f"{instance.address} is not elastic at all gateways: list it in elastic.instances")
        return planned

    def steps(self, address: str) -> list[str]:
        """Return the steps of a move, and move nothing. Raises GatewayProblem."""
        after = self._limits.evacuate_after_seconds
        return self._gateways.move(address, self._targets.role, after, is_dry_run=True)

    def _least_serving(self, there: Sequence[RollInstance], planned: Sequence[RollInstance]) -> int:
        left = len(there) - len(planned)
        least = max(1, left) if self._limits.min_serving is None else self._limits.min_serving
        if planned and left < least:
            stay = format_count(left, f"{self._gateways.role} instance")
            raise RollStopped(
                f"{stay} would stay, and {least} must serve: name fewer with --instance, or lower --min-serving"
            )
        return least

    def _replace(self, address: str) -> None:
        began = time.monotonic()
        seconds = self._limits.drain_seconds + self._limits.ready_seconds
        try:
            self._gateways.move(address, self._targets.role, self._limits.evacuate_after_seconds)
            self._wait(lambda: self._has_moved(address), seconds, f"{address} serves as {self._targets.role}")
        except BaseException:
            if any(instance.address == address for instance in self._gateways.instances()):
                self._put_back(address)
            raise
        self._tell(f"  serves as {self._targets.role} after {time.monotonic() - began:.1f} s")

    def _put_back(self, address: str) -> None:
        self._gateways.move(address, self._gateways.role, None)
        self._progress.taking(None)
        self._tell(f"  {address} stays a {self._gateways.role} instance")

    def _has_moved(self, address: str) -> bool:
        """Return whether the instance serves in its new role. Raises RollStopped if its move has failed."""
        for instance in self._gateways.instances():
            if instance.address == address and instance.problem and not instance.is_moving:
                raise RollStopped(f"the move of {address} failed: {instance.problem}")
        return any(instance.address == address and instance.serves for instance in self._targets.instances())


# Progress of a roll in a file, so that it can be resumed.


@dataclass(slots=True)
class RollProgress:
    """Progress of a roll. Each change is written to its file."""

    path: Path | None
    """Path of the file; None: there is no file."""
    role: str
    began: str
    """Time of the start, as text."""
    done: list[str] = field(default_factory=list)
    """Instances that serve again, in order."""
    current: str | None = None
    """The instance that is out of service; None if there is none."""

    @classmethod
    def resumed(cls, path: Path, role: str, began: str) -> Self:
        """Return the progress in the file, or a new one without a file.

        Raises SettingsError for another roll's file.
        """
        try:
            told = orjson.loads(path.read_bytes())
            if told["role"] != role:
                raise SettingsError(f"{path} belongs to a roll of {told['role']} instances: use another --state")
            return cls(path, role, str(told["began"]), list(told["done"]), told["current"])
        except FileNotFoundError:
            return cls(path, role, began)
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
        except (ValueError, LookupError, TypeError):
            raise SettingsError(f"{path} does not contain the progress of a roll: use another --state") from None

    @property
    def is_begun(self) -> bool:
        """Return whether there is progress of a roll to resume."""
        return bool(self.done) or self.current is not None

    def taking(self, address: str | None) -> None:
        """Note that this instance is taken out of service; None: the last one is back unchanged."""
        self.current = address
        self._write()

    def note_done(self) -> None:
        """Note that the instance serves again."""
        if self.current is not None:
            self.done.append(self.current)
        self.taking(None)

    def forget(self) -> None:
        """Remove the file, because the roll is complete. Raises SettingsError."""
        if self.path is not None:
            with self._writing():
                self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        """Write the progress file atomically."""
        if self.path is not None:
            new = self.path.with_name(f"{self.path.name}.new")
            told = {name: value for name, value in asdict(self).items() if name != "path"}
            with self._writing():
                new.write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
                os.replace(new, self.path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise SettingsError(f"--state {self.path} cannot be written: {reason}") from None
