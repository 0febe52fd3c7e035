"""The tokenizer of a GGUF file, from its metadata.

gpt2     byte-level BPE: tokens and merges; `tokenizer.ggml.pre` names how text is split before the merges apply
llama    SentencePiece BPE: tokens with scores; the pair whose token has the highest score is merged first

Tokens marked as control, and the begin, end, unknown and padding tokens, are special: found whole in any text. Tokens marked
as user-defined are found whole too.
"""

import json
from collections.abc import Sequence
from itertools import chain, islice
from math import isfinite
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ..checks import check_added_tokens
from ..errors import HandgradError, library_errors, shown
from .file import GGUFFile

# Limits of a vocabulary; the largest in use have 2 million characters and 600,000 merges of scores.
MAX_CHARACTERS = 1 << 22
MAX_MERGES = 1 << 20
MAX_SPLIT = 1 << 30  # characters of all ways to split a token into two

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
SPACE = "▁"  # SentencePiece's sign for a space

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Splitting(NamedTuple):
    """How text is split into words before merges apply. `pattern` matches the words; None is GPT-2's pattern."""

    pattern: str | None = None
    digits: bool = False  # every digit is a word, before the pattern applies
    whole_words: bool = False  # a word that is a token needs no merges
    compose: bool = False  # Unicode's form NFC first
    add_bos: bool = False  # if the file does not say


_GPT_2 = Splitting()
_DIGITS = Splitting(digits=True)
_LLAMA_BPE = Splitting(_LLAMA_3, whole_words=True, add_bos=True)
SPLITTINGS = {
    "default": _GPT_2, "gpt-2": _GPT_2, "phi-2": _GPT_2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS,
    "llama3": _LLAMA_BPE, "llama-v3": _LLAMA_BPE, "llama-bpe": _LLAMA_BPE,
    "dbrx": Splitting(_LLAMA_3), "smaug-bpe": Splitting(_LLAMA_3),
    "qwen2": Splitting(_QWEN_2, compose=True),
    "tekken": Splitting(_TEKKEN, whole_words=True, add_bos=True),
}  # fmt: skip


def read_tokenizer(file: GGUFFile) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Build the tokenizer, and the files that a Hugging Face directory has beside its tokenizer.json: the special tokens and
    the chat template, if there is one."""
    kind = file.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise HandgradError(f"{file.path}: the tokenizer is of the kind {shown(kind)}; gpt2 and llama are supported")
    vocabulary = _vocabulary(file)
    types = _token_types(file, len(vocabulary))
    special = _special_tokens(file)
    added = _added_tokens(file, vocabulary, types, special)
    if kind == "gpt2":
        splitting = _splitting(file)
        inner = _byte_pairs(file, vocabulary, splitting)
    else:
        inner = _sentencepiece(file, vocabulary, types, special.get("unk"))
    with library_errors(f"{file.path}: the special tokens cannot be used"):
        inner.add_special_tokens([token for token in added if token.special])
        inner.add_tokens([token for token in added if not token.special])
    add_bos = file.boolean("tokenizer.ggml.add_bos_token", kind == "llama" or splitting.add_bos) and "bos" in special
    add_eos = file.boolean("tokenizer.ggml.add_eos_token", False) and "eos" in special
    if add_bos or add_eos:
        around = [name for name, is_added in (("bos", add_bos), ("eos", add_eos)) if is_added]
        pieces = [special[name] for name in around]
        pieces.insert(add_bos, "$A")
        with library_errors(f"{file.path}: the tokens before and after a text cannot be used"):
            ids = [(special[name], vocabulary[special[name]]) for name in around]
            inner.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        **{f"{name}_token": token for name, token in special.items()},
    }
    extra_files = {"tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n"}
    if "tokenizer.chat_template" in file.metadata:
        extra_files["chat_template.jinja"] = file.text("tokenizer.chat_template")
    return inner, extra_files


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    tokens = file.array("tokenizer.ggml.tokens", str)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if not tokens:
        raise HandgradError(f"{file.path}: tokenizer.ggml.tokens is empty: convert the model again")
    if len(vocabulary) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise HandgradError(f"{file.path}: the vocabulary has {shown(twice)} twice: convert the model again")
    return vocabulary


def _token_types(file: GGUFFile, n: int) -> list[int]:
    types = file.array("tokenizer.ggml.token_type", int, [NORMAL] * n)
    _check_length(file, "tokenizer.ggml.token_type", types, n)
    return types


def _check_length(file: GGUFFile, key: str, values: Sequence[object], n: int) -> None:
    if len(values) != n:
        raise HandgradError(f"{file.path}: {key} has {len(values):,} values for {n:,} tokens: convert the model again")


def _special_tokens(file: GGUFFile) -> dict[str, str]:
    """The tokens that the file names as begin, end, unknown and padding."""
    tokens = file.array("tokenizer.ggml.tokens", str)
    found = {}
    for name, key in SPECIAL.items():
        i = file.metadata.get(f"tokenizer.ggml.{key}")
        if i is None:
            continue
        if type(i) is not int or not 0 <= i < len(tokens):
            raise HandgradError(
                f"{file.path}: tokenizer.ggml.{key} is {shown(i)}, not an id below {len(tokens):,}: convert the model again"
            )
        found[name] = tokens[i]
    return found


def _splitting(file: GGUFFile) -> Splitting:
    name = file.text("tokenizer.ggml.pre")
    if name not in SPLITTINGS:
        raise HandgradError(
            f"{file.path}: tokenizer.ggml.pre is {shown(name)}; this way of splitting text is not known, only"
            f" {', '.join(SPLITTINGS)}"
        )
    return SPLITTINGS[name]


def _byte_pairs(file: GGUFFile, vocabulary: dict[str, int], splitting: Splitting) -> tokenizers.Tokenizer:
    merges = []
    for merge in file.array("tokenizer.ggml.merges", str):
        space = merge.find(" ", 1)
        if space < 0:
            raise HandgradError(f"{file.path}: the merge {shown(merge)} is not two tokens: convert the model again")
        merges.append((merge[:space], merge[space + 1 :]))
    with library_errors(f"{file.path}: the tokens and merges are not a vocabulary"):
        inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting.whole_words))
    split_words(inner, splitting)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    return inner


def split_words(inner: tokenizers.Tokenizer, splitting: Splitting) -> None:
    """Let a byte-level tokenizer split text in this way."""
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
    if splitting.pattern is not None:
        split = pre_tokenizers.Split(Regex(splitting.pattern), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, inner.pre_tokenizer])
    elif splitting.digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        inner.pre_tokenizer = pre_tokenizers.Sequence([digits, inner.pre_tokenizer])
    if splitting.compose:
        inner.normalizer = normalizers.NFC()


def _sentencepiece(
    file: GGUFFile, vocabulary: dict[str, int], types: list[int], unknown: str | None
) -> tokenizers.Tokenizer:
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if file.metadata.get(f"tokenizer.ggml.{key}"):
            raise HandgradError(f"{file.path}: tokenizer.ggml.{key} is not supported for a tokenizer of the kind llama")
    scores = file.array("tokenizer.ggml.scores", float)
    _check_length(file, "tokenizer.ggml.scores", scores, len(vocabulary))
    if not all(map(isfinite, scores)):
        raise HandgradError(
            f"{file.path}: tokenizer.ggml.scores has values that are not finite: convert the model again"
        )
    merges = _merges_of_scores(file, vocabulary, types, scores)
    with library_errors(f"{file.path}: the tokens are not a vocabulary"):
        model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    prefix = file.boolean("tokenizer.ggml.add_space_prefix", True)
    inner.normalizer = sentencepiece_spaces(prefix)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return inner


def sentencepiece_spaces(prefix: bool) -> normalizers.Normalizer:
    """Write spaces as SentencePiece does, and one before the text with `prefix`."""
    spaces = normalizers.Replace(" ", SPACE)
    return normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces


def _merges_of_scores(
    file: GGUFFile, vocabulary: dict[str, int], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to split a token into two tokens, tokens with high scores first."""
    normal = {token for token, i in vocabulary.items() if types[i] == NORMAL}
    if sum(map(len, normal)) > MAX_CHARACTERS:
        raise HandgradError(f"{file.path}: the tokens have more than {MAX_CHARACTERS:,} characters, the maximum")
    if sum(len(token) ** 2 for token in normal) > MAX_SPLIT:
        longest = max(map(len, normal))
        raise HandgradError(f"{file.path}: the tokens are too long to be split; the longest has {longest:,} characters")
    in_order = sorted(normal, key=lambda token: (-scores[vocabulary[token]], vocabulary[token]))
    splits = (((token[:i], token[i:]) for i in range(1, len(token))) for token in in_order)
    pairs = (pair for pair in chain.from_iterable(splits) if pair[0] in normal and pair[1] in normal)
    merges = list(islice(pairs, MAX_MERGES + 1))
    if len(merges) > MAX_MERGES:
        raise HandgradError(f"{file.path}: the tokens imply more than {MAX_MERGES:,} merges, the maximum")
    return merges


def _added_tokens(
    file: GGUFFile, vocabulary: dict[str, int], types: list[int], special: dict[str, str]
) -> list[AddedToken]:
    """The special and the user-defined tokens. All of them are in the vocabulary."""
    named = set(special.values())
    whole = (UNKNOWN, CONTROL, USER_DEFINED)
    found = [token for token, i in vocabulary.items() if token and (types[i] in whole or token in named)]
    check_added_tokens(found, file.path)
    plain = {token for token in found if types[vocabulary[token]] == USER_DEFINED and token not in named}
    return [AddedToken(token, normalized=False, special=token not in plain) for token in found]
