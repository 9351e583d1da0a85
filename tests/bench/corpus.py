"""Notes and questions from a fixed seed: the same on every machine."""

import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import accumulate

SEED = 20261130
WORDS = 20_000
COMMON = 100
"""So many of the commonest words are in a fifth of all notes and more: in the text, but nothing to ask for."""
FOLDERS = ("decisions", "incidents", "meetings", "notes", "people", "projects", "recipes", "runbooks")
CHINESE = "部署窗口发布回滚监控告警缓存数据库索引分支合并审查测试环境配置网络延迟容量备份恢复权限密钥日志"
CHINESE_SHARE = 0.06
"""Of the notes, and of the questions."""


@cache
def vocabulary() -> tuple[str, ...]:
    """20,000 different words, the commonest first."""
    rng = random.Random(f"{SEED}:words")
    starts, vowels, ends = "b c d f g h k l m n p r s t v z br ch cr dr gr pl pr sh st tr".split(), "aeiou", "lmnrstx"
    found: dict[str, None] = {}
    while len(found) < WORDS:
        syllables = rng.choices((2, 3, 4), (5, 4, 1))[0]
        word = "".join(rng.choice(starts) + rng.choice(vowels) for _ in range(syllables))
        found[word + (rng.choice(ends) if rng.random() < 0.5 else "")] = None
    return tuple(found)


@cache
def _zipf() -> list[float]:
    return list(accumulate(1 / (rank + 2.7) for rank in range(WORDS)))


def note(number: int, version: int = 0) -> tuple[str, str]:
    """Path and Markdown text (1 to 3 kB) of a note; another `version` is the same file after that edit."""
    rng = random.Random(f"{SEED}:{number}")
    title = [word.capitalize() for word in rng.choices(vocabulary()[COMMON:], k=3)]
    folder = f"{rng.choice(FOLDERS)}/{rng.choice((2025, 2026))}-{rng.randint(1, 12):02}"
    path = f"{folder}/{'-'.join(title).lower()}-{number:05}.md"
    size = rng.randint(1_000, 3_000)
    parts = [f"# {' '.join(title)}\n\nDate: 2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}\n"]
    if rng.random() < CHINESE_SHARE:
        parts.append("\n" + "，".join("".join(rng.choices(CHINESE, k=6)) for _ in range(8)) + "。\n")
    if version:
        parts.append(f"\nEdited: {marker(version)}.\n")
    while sum(map(len, parts)) < size:
        words = " ".join(rng.choices(vocabulary(), cum_weights=_zipf(), k=rng.randint(8, 40)))
        parts.append(
            rng.choice(
                (f"\n{words.capitalize()}.\n", f"- {words}\n", f"\n## {words[:30].strip().title()}\n\n{words}\n")
            )
        )
    return path, "".join(parts)


def marker(version: int) -> str:
    """A word that is in the notes of this edit and nowhere else, not even as a beginning."""
    return f"qz{version:06}"


def notes(count: int) -> Iterator[tuple[str, str]]:
    """The first `count` notes; a smaller corpus is the beginning of a larger one."""
    return map(note, range(count))


def questions(files: int, count: int, purpose: str) -> list[str]:
    """Different questions of one to three words, nine of ten with words of one note; the rest mix notes.

    Another purpose gives another list.
    """
    rng = random.Random(f"{SEED}:{files}:{purpose}")
    common = set(vocabulary()[:COMMON])
    found: dict[str, None] = {}
    while len(found) < count:
        text = note(rng.randrange(files))[1]
        other = note(rng.randrange(files))[1] if rng.random() < 0.1 else ""
        chinese = re.findall("[\u4e00-\u9fff]{6}", text)
        if chinese and rng.random() < 0.5:
            run = rng.choice(chinese)
            found[run[: rng.choice((2, 2, 3))]] = None
            continue
        words = sorted(set(re.findall("[a-z]{4,}", (text + other).lower())) - common)
        found[" ".join(rng.sample(words, rng.choice((1, 2, 2, 3))))] = None
    return list(found)
