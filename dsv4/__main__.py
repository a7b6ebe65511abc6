"""The program `dsv4`, and `python -m dsv4`. Knows nothing but Ctrl-C: exit code 130, even during imports."""

import os
import signal
import sys
from types import FrameType


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A KeyboardInterrupt inside an import may be lost (torch's C code drops numpy's) or abort the process.

    So while a module is imported, the process ends here.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if os.isatty(2):
                os.write(2, b"\x1b[?25h")  # a progress bar may have hidden the cursor
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    # Where it is ignored (nohup, a job in the background) it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from dsv4.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
