"""Branches, the profiles that stand for them, and the names of their workspaces. Pure: starts nothing."""

import re
from dataclasses import dataclass
from hashlib import sha256

from memgw.errors import InvalidBranch, InvalidProfile

MAX_BRANCH_BYTES = 244
"""A ref's file name with `.lock` behind it must fit into the 255 bytes of common file systems."""

MAX_WORKSPACE_BYTES = 100

# git check-ref-format(1), rules 1 to 10, and git branch's own refusal of a leading dash
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^[-/]|[/.]$|(^|/)\.|\.lock(/|$)")

WORKSPACE = re.compile(
    r"main|memory-[0-9]{4}-[0-9]{2}|task-[A-Za-z0-9][A-Za-z0-9._-]{0,94}|[A-Za-z0-9_][A-Za-z0-9_-]{0,59}~[0-9a-f]{12}"
)
"""What `Branch.workspace` may be: whatever else lies beside workspaces is not ours."""

_MONTH = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])")
_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Branch:
    """A name that Git would take for `refs/heads/<name>`; can't be wrong once it exists."""

    name: str

    @classmethod
    def parse(cls, text: str) -> "Branch":
        """Raises InvalidBranch for whatever Git would refuse, a leading `-`, or over 244 bytes."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidBranch("the branch name is not valid Unicode") from None
        if not size:
            raise InvalidBranch("the branch name is empty")
        if size > MAX_BRANCH_BYTES:
            raise InvalidBranch(f"the branch name is longer than {MAX_BRANCH_BYTES} bytes")
        if _FORBIDDEN.search(text):
            raise InvalidBranch("the branch name is not one that Git allows (see git check-ref-format)")
        return cls(text)

    @classmethod
    def of_profile(cls, profile: str) -> "Branch":
        """`stable` → main, `monthly-YYYY-MM` → memory/YYYY-MM, `task-<id>` → task/<id>."""
        kind, dash, rest = profile.partition("-")
        if profile == "stable":
            return cls("main")
        if kind == "monthly" and _MONTH.fullmatch(rest):
            return cls(f"memory/{rest}")
        if kind == "task" and dash:
            try:
                return cls.parse(f"task/{rest}")
            except InvalidBranch as exc:
                raise InvalidProfile(f"the task's id can't be a branch: {exc.detail}") from None
        raise InvalidProfile("a profile is stable, monthly-YYYY-MM or task-<id>")

    @property
    def has_profile(self) -> bool:
        """Whether a memory profile stands for it."""
        group, slash, rest = self.name.partition("/")
        if group == "memory":
            return bool(_MONTH.fullmatch(rest))
        return self.name == "main" or (group == "task" and bool(slash))

    @property
    def ref(self) -> str:
        """The full name in the remote."""
        return f"refs/heads/{self.name}"

    @property
    def mirror_ref(self) -> str:
        """The full name in the mirror: flat, so that `task/a` and `task/a/b` never collide."""
        return f"refs/memgw/{self._digest}"

    @property
    def workspace(self) -> str:
        """The name on disk: at most 100 bytes of `[A-Za-z0-9._~-]`, different for every branch.

        Standard branches read as themselves and hold no `~`; any other is a slug, `~`, and a hash.
        """
        group, _, rest = self.name.partition("/")
        plain = f"{group}-{rest}"
        if self.name == "main":
            return "main"
        if group == "memory" and _MONTH.fullmatch(rest):
            return plain
        if group == "task" and _TASK_ID.fullmatch(rest) and len(plain) <= MAX_WORKSPACE_BYTES:
            return plain
        slug = re.sub(r"[^A-Za-z0-9_]+", "-", self.name).strip("-")[:60].strip("-")
        return f"{slug or 'branch'}~{self._digest[:12]}"

    @property
    def _digest(self) -> str:
        return sha256(self.name.encode()).hexdigest()[:40]
