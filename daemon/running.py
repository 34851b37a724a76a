"""The requests that are being answered now, for `ps -v` and `cancel`.

Owner: ModelManager, on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class RunningRequest:
    """One sequence. Listed from `begin` to `end`; whoever runs it says what it has told."""

    def __init__(
        self,
        id: str,
        model: str,
        client: str,
        began_at: float,
        listed: RunningRequests,
        cancel: Callable[[], None],
        completed: Callable[[], None],
    ) -> None:
        """`cancel` ends it; `completed` is told when it has come to its own end."""
        self.id = id
        self.model = model
        self.client = client
        self.began_at = began_at  # monotonic
        self.num_prompt_tokens = 0
        self.output_ids: Sequence[int] = ()  # grows while it runs
        self.is_cancelled = False
        self._listed = listed
        self._cancel = cancel
        self.completed = completed

    def begin(self, output_ids: Sequence[int]) -> None:
        self.output_ids = output_ids
        self._listed.add(self)

    def end(self) -> None:
        self._listed.remove(self)

    def cancel(self) -> None:
        """Its client gets a proper end. A request whose worker is being replaced ends there."""
        self.is_cancelled = True
        self._cancel()


class RunningRequests:
    """All of them, by id."""

    def __init__(self) -> None:
        self._requests: dict[str, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: RunningRequest) -> None:
        self._requests[request.id] = request

    def remove(self, request: RunningRequest) -> None:
        if self._requests.get(request.id) is request:
            del self._requests[request.id]

    def list(self) -> list[RunningRequest]:
        """The longest running first."""
        return sorted(self._requests.values(), key=lambda request: request.began_at)

    def cancel(self, beginning: str) -> RunningRequest | None:
        """End the one request whose id begins so. None: there is none, or more than one."""
        matches = [request for id, request in self._requests.items() if id.startswith(beginning)]
        if len(matches) != 1 or not beginning:
            return None
        matches[0].cancel()
        return matches[0]
