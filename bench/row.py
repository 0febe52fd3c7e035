"""A measurement: one contender on one case."""

from dataclasses import dataclass

NAN = float("nan")
MISSING = "missing"  # the beginning of a problem that is no failure: something optional is not installed
BOUND = "bandwidth bound"  # a contender that no other can beat
OURS = ("handgrad", "…", "as written", "transposed")  # beginnings of the names of handgrad's contenders
MIXED = "mixed"  # the end of the names of handgrad's contenders in mixed precision
AUTOCAST = ", autocast"  # the end of the names of peers under torch.autocast in bfloat16
TWO_BYTES = ", weights in bfloat16"  # of peers that store them so, which takes the least memory


@dataclass
class Row:
    """A measurement, or the reason why there is none."""

    scenario: str
    case: str
    contender: str
    tokens: int = 0
    seconds: float = NAN  # best round
    median: float = NAN
    ratio: float = NAN  # best time of the reference ÷ this one's: larger is faster
    gradient_error: float = NAN  # largest relative error of a gradient against the reference
    gradient_seconds: float = NAN  # without the optimizer
    mfu: float = NAN  # time of the matmuls alone ÷ gradient_seconds
    memory: int = 0  # peak bytes above weights and optimizer state; finetune, context, explain: of the process
    memory_ratio: float = NAN  # this one's memory ÷ the reference's
    predicted_seconds: float = NAN
    predicted_memory: int = 0
    note: str = ""
    above_torch: int = 0  # peak bytes of the process above an interpreter with torch loaded
    above_torch_ratio: float = NAN
    bytes_per_token: float = NAN  # growth of memory since the next smaller number of tokens
    of_idle: float = NAN  # speed ÷ this one's speed when no other process wants a core
    of_bound: float = NAN  # speed ÷ that at which memory delivers what this one reads
    cosine: float = NAN  # of a rounded contender; its gradient_error is that of all gradients together
    worst: float = NAN  # largest relative error of one gradient of a rounded contender
    gflops: float = NAN  # 10⁹ operations per second of a product
    problem: str = ""  # "missing: …", "wrong: …" or "failed: …": why figures are empty

    @property
    def is_ours(self) -> bool:
        return self.contender.startswith(OURS)

    @property
    def is_mixed(self) -> bool:
        return self.contender.endswith(MIXED)

    @property
    def is_rounded(self) -> bool:
        return is_rounded(self.contender)

    @property
    def has_failed(self) -> bool:
        """Whether a contender of handgrad failed or was wrong."""
        return self.is_ours and bool(self.problem) and not self.problem.startswith(MISSING)


def is_rounded(contender: str) -> bool:
    """Whether operands of its products are rounded to bfloat16, while those of the others are float32."""
    return contender.endswith((MIXED, AUTOCAST, TWO_BYTES))
