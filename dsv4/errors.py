"""What a user, a checkpoint or a machine can cause. Each message says: found, expected, what to do."""


class Dsv4Error(Exception):
    """Base of every error the program reports as one sentence instead of a traceback."""


class ConfigError(Dsv4Error):
    """config.json, an engine option or a command-line value is wrong."""


class CheckpointError(Dsv4Error):
    """The weight files are damaged, incomplete or of an unknown format."""


class RequestError(Dsv4Error):
    """A request cannot be served: it does not fit, or its parameters make no sense."""


class TextError(Dsv4Error):
    """A tokenizer file or a conversation cannot be encoded."""


# What the next request may do better; after a DeviceError there may be no engine.
REFUSALS = (ConfigError, RequestError, TextError)


class DeviceError(Dsv4Error):
    """The machine lacks what was asked for."""


class LostError(DeviceError):
    """A GPU or a rank is lost, and the engine with it. `reason`: without what to do about it. `public`: the
    same without the names of machines, for clients."""

    def __init__(self, reason: str, public: str = "") -> None:
        super().__init__(f"{reason}; start the engine anew")
        self.reason, self.public = reason, public or reason
