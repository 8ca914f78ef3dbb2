"""`--ranks`: run a verb on several ranks. The first process launches them and waits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from signal import Signals
from typing import Any

from lookahead.cli.common import FAILED, Host, Model
from lookahead.cli.settings import Settings


@dataclass(frozen=True)
class Ranks:
    """The rank options, and whether torchrun's variables make this process a rank."""

    count: int | None
    timeout: float
    check: bool

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ValueError(f"--ranks {self.count}: give at least 1")
        if not self.timeout >= 2:
            raise ValueError(f"--rank-timeout {self.timeout:g}: give at least 2 seconds")

    @property
    def started(self) -> bool:
        """Whether this process was started as a rank."""
        return "RANK" in os.environ and "WORLD_SIZE" in os.environ

    @property
    def together(self) -> bool:
        """Whether there are several ranks."""
        return (self.count or 1) > 1 or (self.started and os.environ["WORLD_SIZE"] != "1")

    @property
    def size(self) -> int:
        """The number of ranks, started or not."""
        return int(os.environ["WORLD_SIZE"]) if self.started else self.count or 1

    @property
    def follows(self) -> bool:
        """Whether this process is a rank other than 0, which prints nothing."""
        return self.together and self.started and os.environ["RANK"] != "0"

    def launch(self, host: Host, prompt: str | None, forwarded: Sequence[Signals] = ()) -> int:
        """Start all ranks and wait for them; rank 0 reads `prompt` from its stdin, and gets the `forwarded` signals.
        Returns the exit code."""
        from lookahead.parallel.launch import LOOKAHEAD, launch

        command = [*LOOKAHEAD, *host.arguments]
        return launch(command, self.count or 1, prompt, lambda line: host.say(line, style="red"), forwarded)

    def load(self, host: Host, settings: Settings) -> Model:
        """Load the model, together with any other ranks."""
        if not self.together:
            return settings.load(host)
        import lookahead.parallel

        settings.validate()
        model: Any = lookahead.parallel.load(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            backend=settings.backend,
            log=None if self.follows else host.say,
            ranks=self.count,
            timeout=self.timeout,
            check=self.check,
        )
        return model

    @contextmanager
    def watched(self, host: Host) -> Iterator[None]:
        """Report the loss of another rank as one line, and exit.

        It exits without cleaning up, because a thread may still be waiting for the lost rank.
        """
        if not self.together:
            yield
            return
        from lookahead.parallel import RankError

        try:
            yield
        except RankError as error:
            if host.debug:
                raise
            host.fail(error)
            os._exit(FAILED)
