"""A decoder's colour in every plot: Okabe and Ito's, which the colour-blind tell apart; peers are grey."""

from matplotlib.colors import to_rgb

COLORS = {
    "plain": "#4d4d4d",
    "base": "#4d4d4d",
    "sdsat": "#0072b2",
    "adaptive": "#332288",
    "auto": "#d55e00",
    "ngrams": "#882255",
    "prompt lookup": "#8c6d31",
    "ssd": "#56b4e9",
    "tsd": "#009e73",
    "gsd": "#cc79a7",
    "gsd probes": "#e69f00",
    "generate": "#d9d9d9",
    "generate prompt lookup": "#bdbdbd",
    "generate assisted": "#969696",
    "vllm": "#737373",
}
OTHERS = "#000000"
WHO = {"base": "#999999", "model": COLORS["sdsat"]}
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", ":", "-.")


def color(decoder: str) -> str:
    """A decoder's colour."""
    return COLORS.get(decoder, OTHERS)


def faded(decoder: str, share: float) -> tuple[float, float, float]:
    """The same, mixed with a share of white."""
    red, green, blue = (part + (1 - part) * share for part in to_rgb(color(decoder)))
    return red, green, blue
