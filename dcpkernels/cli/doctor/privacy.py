"""Takes out of a text what belongs to a machine or a person: names, addresses, paths, identities of devices.

Checks do not show such things to begin with; but errors of drivers and of the operating system come as they come.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import sys
from collections.abc import Mapping, Sequence

# Of everybody, and so of nobody.
_COMMON = {"", "root", "user", "localhost"}
_SHORTEST = 3  # a shorter name would be found in every other word

# Paths that are the same on all machines.
_PUBLIC = ("/dev/", "/proc/", "/sys/")
# A path is a slash after what cannot be part of a word: and/or, 13.0/580 and $HOME/lib are none.
_PATH = re.compile(r"(?<![\w.$/*<])(?<!<path>)(?:file:/{1,3}|\.{0,2}/|~)[^\s'\"`,;:()<>|]*")
# Between quotes it may have spaces, and all else.
_QUOTED_PATH = re.compile(r"(?P<quote>['\"])(?P<path>(?:\.{0,2}/(?!/)|~).*?)(?P=quote)")
_LIBRARY = re.compile(r"[\w.+-]+\.(?:so[\d.]*|py)")  # the end of a path that says something

_PATTERNS = (
    (re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<uuid>"),
    (re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F]{8,}\b"), "<uuid>"),
    (re.compile(r"\b(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]\b"), "<pci>"),
    (re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)"), "<address>"),
    (re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:)+(?::[0-9a-fA-F]{1,4})+(?![\w:])"), "<address>"),  # fd00::5
    (re.compile(r"\b[0-9a-fA-F]{2}(?:-[0-9a-fA-F]{2}){5}\b"), "<address>"),
    # IPv6, and what network cards have.
    (re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])"), "<address>"),
    (re.compile(r"\b[0-9a-fA-F]{32,}\b"), "<id>"),
)


class Scrubber:
    """`words`: what else is private, and what stands for it. `public`: how paths begin that may be shown, besides those
    that are the same on all machines. `folders`: such as have spaces in their names, by which a path would seem to end."""

    def __init__(
        self, words: Mapping[str, str] | None = None, public: Sequence[str] = (), folders: Sequence[str] = ()
    ) -> None:
        self._folders = sorted((folder for folder in folders if " " in folder), key=len, reverse=True)
        self._public = (*_PUBLIC, *public)
        chosen = {word: sign for word, sign in (words or {}).items() if word not in _COMMON and len(word) >= _SHORTEST}
        # The longest first: one may be a part of another.
        self._words: Sequence[tuple[re.Pattern[str], str]] = [
            (re.compile(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])"), chosen[word])
            for word in sorted(chosen, key=len, reverse=True)
        ]

    @classmethod
    def of_this_machine(cls, environ: Mapping[str, str] = os.environ, public: Sequence[str] = ()) -> Scrubber:
        words = {environ.get(name, ""): "<user>" for name in ("USER", "LOGNAME", "SUDO_USER")}
        try:
            words[pwd.getpwuid(os.getuid()).pw_name] = "<user>"
        except KeyError:  # a container need not know its user
            pass
        name = socket.gethostname()
        words |= {environ.get("HOSTNAME", ""): "<host>", name: "<host>", name.partition(".")[0]: "<host>"}
        home = os.path.basename(environ.get("HOME", "").rstrip("/"))
        # Of the home, of Python, of packages: what errors speak of.
        folders = [environ.get("HOME", ""), sys.prefix, *(" ".join(path.split()) for path in sys.path)]
        return cls({home: "<user>"} | words, public, folders)

    def clean(self, text: str) -> str:
        """One line of `text`."""
        text = " ".join(text.split())
        for pattern, sign in _PATTERNS:
            text = pattern.sub(sign, text)
        for folder in self._folders:
            text = text.replace(folder, "<path>")
        text = _QUOTED_PATH.sub(lambda found: f"'{self._without_folders(found['path'])}'", text)
        text = _PATH.sub(lambda found: self._without_folders(found.group()), text)
        for word, sign in self._words:
            text = word.sub(sign, text)
        return text

    def _without_folders(self, path: str) -> str:
        if path in ("/", "~") or path.startswith("//") or f"{path}/".startswith(self._public):  # //: of a URL
            return path
        name = path.rpartition("/")[2]
        return f"<path>/{name}" if _LIBRARY.fullmatch(name) else "<path>"
