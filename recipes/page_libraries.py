"""Fetch the chat page's libraries at pinned versions, check them, and write them as modules beside the page.

    python -m recipes.page_libraries

`npm pack` fetches from the configured package registry. Each archive must have the SHA-512 pinned here. To
update a library, change its version and digest. tests/serve/test_page_files.py checks the written files.
"""

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dsv4.disk import whole
from dsv4.errors import Dsv4Error

VENDOR = Path(__file__).parents[1] / "dsv4" / "serve" / "page" / "vendor"
# A language comes after those that it extends.
LANGUAGES = (
    *("markup", "css", "clike", "javascript", "typescript", "python", "bash", "json", "c", "cpp", "csharp"),
    *("rust", "go", "java", "kotlin", "swift", "ruby", "lua", "r", "julia", "sql", "yaml", "toml", "ini"),
    *("diff", "docker", "makefile", "latex"),
)


@dataclass(frozen=True)
class Library:
    """Files of one npm package, joined between `head` and `tail` into one module."""

    name: str
    version: str
    sha512: str  # of the archive, in base64, as package-lock.json has it
    files: tuple[str, ...]
    head: str = ""
    tail: str = ""


LIBRARIES = (
    Library(
        "markdown-it",
        "15.0.3",
        "+Az7Ojz3iRGu8KYMvJ6xVhvrxP3eE+vEtJX75Ow88XBpcQNV/0lGX5ZynIIBftREo4DC2jsveAMDaeltmm8QvQ==",
        ("dist/browser/markdown-it.umd.min.js",),
        tail="export default globalThis.markdownit;\n",
    ),
    Library(
        "temml",
        "0.13.5",
        "aPkDDgunanpLNL0ql32HbolqLep+w8DRcVXRql7rWrMt/PhczdLgL4UBYYVU3BYjCNjkGq4EqwIicu/zWr1iOg==",
        ("dist/temml.min.js",),
        tail="export default temml;\n",
    ),
    Library(
        "prismjs",
        "1.30.0",
        "DEvV2ZF2r2/63V+tK8hQvrR2ZGn10srHbXviTlcv7Kpzw8jWiNTqbVgjO3IY8RxrrOUF8VPMQQFysYYYv0YZxw==",
        ("components/prism-core.min.js", *(f"components/prism-{name}.min.js" for name in LANGUAGES)),
        head="globalThis.Prism = { manual: true, disableWorkerMessageHandler: true };\n",
        tail="export default Prism;\n",
    ),
)


def fetch(library: Library) -> bytes:
    """The package's archive, checked."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"{library.name}@{library.version}"
        subprocess.run(["npm", "pack", "--silent", wanted], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).iterdir()
        data = archive.read_bytes()
    found = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != library.sha512:
        raise Dsv4Error(
            f"{wanted} has SHA-512 {found}, expected {library.sha512}; check where npm fetches from"
        )
    return data


def joined(library: Library, archive: bytes) -> tuple[bytes, bytes]:
    """-> the module and its licence."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:

        def read(name: str) -> str:
            member = tar.extractfile(f"package/{name}")
            assert member is not None, name
            return member.read().decode()

        parts = [
            line
            for name in library.files
            for line in read(name).splitlines()
            if not line.startswith("//# sourceMappingURL=")
        ]
        licence = read("LICENSE")
    first = f"// {library.name} {library.version}; licence: {library.name}.LICENSE\n"
    return (first + library.head + "\n".join(parts) + "\n" + library.tail).encode(), licence.encode()


def main() -> None:
    VENDOR.mkdir(exist_ok=True)
    for library in LIBRARIES:
        module, licence = joined(library, fetch(library))
        for kind, data in (("js", module), ("LICENSE", licence)):
            with whole(VENDOR / f"{library.name}.{kind}") as part:
                part.write_bytes(data)
        print(f"{hashlib.sha256(module).hexdigest()}  {library.name}.js  {len(module):,} bytes")  # noqa: T201


if __name__ == "__main__":
    try:
        main()
    except Dsv4Error as error:
        sys.exit(f"error: {error}")
