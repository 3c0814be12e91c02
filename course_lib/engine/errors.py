"""The errors that decide how a worker ends, each with its exit code."""


class UsageError(Exception):
    """Wrong usage or unusable input: exit code 2, one line, and no restart.

    The message is the whole of what the user sees, so it names the option or the file and says what to do.
    """


class Preempted(Exception):
    """Training stopped because it was asked to, with a snapshot published: exit code 143.

    `tell_agent` is False when the request came from the agent, which then knows what it wants next.
    """

    def __init__(self, message: str, tell_agent: bool = True) -> None:
        super().__init__(message)
        self.tell_agent = tell_agent


class PeerLost(RuntimeError):
    """Another rank went away in the middle of a collective: exit code 1, and the agent restarts the group."""


class NonFiniteError(RuntimeError):
    """A loss or a weight is NaN or infinite: exit code 1, and nothing is snapshotted."""


class SnapshotError(RuntimeError):
    """A snapshot that must be written could not be, or must not be, since the ranks' weights differ: exit code 1."""
