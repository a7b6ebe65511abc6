"""Where a person types: history across runs, several lines, completion, a status line. On prompt_toolkit."""

from collections.abc import Callable, Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Always, Condition
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style
from prompt_toolkit.utils import get_cwidth

from dsv4.cli.chat import QUOTES
from dsv4.cli.show import say_note
from dsv4.env import state_folder

STYLE = Style.from_dict({"bottom-toolbar": "noreverse #888888", "prompt": "bold"})
TAKES_PATH = ("/file", "/load", "/save")


def open_session(commands: dict[str, str], status: Callable[[], list[str]]) -> PromptSession[str]:
    """`commands`: names and words, to complete; `status`: parts of the line below, the first ones first."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.lstrip().startswith(QUOTES) and buffer.text.count(QUOTES) < 2:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    def toolbar() -> FormattedText:
        width, shown = session.app.output.get_size().columns, ""
        for part in status():
            longer = f"{shown} · {part}" if shown else part
            shown = longer if get_cwidth(longer) <= width else shown
        return FormattedText([("class:bottom-toolbar", shown)])

    session: PromptSession[str] = PromptSession(
        history=_history(),
        multiline=True,
        key_bindings=keys,
        completer=_Commands(commands),
        complete_while_typing=Condition(lambda: session.default_buffer.text.startswith("/")),
        reserve_space_for_menu=5,
        bottom_toolbar=toolbar,
        prompt_continuation="  ",
        style=STYLE,
    )
    session.layout.current_window.dont_extend_height = Always()  # the status line stays below the input
    return session


class _Commands(Completer):
    def __init__(self, commands: dict[str, str]) -> None:
        self._commands, self._paths = commands, PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        name, space, rest = typed.partition(" ")
        if not typed.startswith("/") or "\n" in typed:
            return
        if not space:
            for command, words in self._commands.items():
                if command.startswith(typed):
                    yield Completion(command, start_position=-len(typed), display_meta=words)
        elif name in TAKES_PATH:
            yield from self._paths.get_completions(Document(rest, len(rest)), complete_event)


class _File(FileHistory):
    """Readable by its owner only; a full disk costs the history and not the conversation."""

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError as error:
            say_note(f"{self.filename!s} cannot be written ({error.strerror}); this line is not kept")


def _history() -> History:
    path = state_folder() / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)
    except OSError as error:
        say_note(f"{path} cannot be written ({error.strerror}); history ends with this program")
        return InMemoryHistory()
    return _File(path)
