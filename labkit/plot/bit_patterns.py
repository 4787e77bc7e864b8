"""A number's bits in one or more formats: sign, exponent and fraction, with the formula."""

from fractions import Fraction

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.plot.figure import Picture, label, size_in, styled
from labkit.plot.style import BLUE, GRAY, GREEN, MUTED, PAPER, SMALL_PT, VERMILION, text_on
from labkit.precision.formats import Exact, Format, decimal, format_of

SET = {"sign": VERMILION, "exponent": BLUE, "leading bit": GRAY, "fraction": GREEN}
CLEAR = {"sign": "#FBE3D5", "exponent": "#DCEBF5", "leading bit": "#E3E6EA", "fraction": "#DDF1EA"}
LEFT_IN, ROW_IN, AROUND_IN = 1.0, 0.78, 0.46
BOX_IN, BOX_HIGH_IN, READABLE_IN, ALL_BOXES_IN = 0.27, 0.27, 0.12, 8.8


@styled
def bits(
    value: Exact | int,
    *formats: Format | str,
    patterns: "list[int] | None" = None,
    figure: Figure | None = None,
) -> Figure:
    """A number in each format: the bits, the formula they encode, and the rounding error.

    Args:
        value: the number to round to each format.
        formats: names in `labkit.precision.FORMATS`, or a `Format` of your own.
        patterns: bit patterns to show instead of `value`, one per format.

    Raises ValueError if no format is given or a name is unknown.
    """
    chosen = [format_of(name) for name in formats]
    if not chosen:
        raise ValueError(f"bits({value}): name at least one format, e.g. bits({value}, 'fp16')")
    figure = figure or Picture(AROUND_IN + ROW_IN * len(chosen))
    width_in, height_in = size_in(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width_in), ylim=(0, height_in))
    axes.axis("off")
    box_in = min(BOX_IN, ALL_BOXES_IN / max(format.width_bits for format in chosen))
    shown = patterns or [format.encode(value) for format in chosen]
    for i, (format, pattern) in enumerate(zip(chosen, shown, strict=True)):
        top = height_in - AROUND_IN - i * ROW_IN
        middle = top - BOX_HIGH_IN / 2
        boxes, colors = [], []
        for place, digit in enumerate(f"{pattern:0{format.width_bits}b}"):
            x = LEFT_IN + place * box_in
            color = (SET if digit == "1" else CLEAR)[field_of(format, place)]
            boxes.append((x, box_in))
            colors.append(color)
            if box_in >= READABLE_IN:
                label(axes, (x + box_in / 2, middle), digit, va="center_baseline",
                      color=text_on(color))  # fmt: skip
        lane = (top - BOX_HIGH_IN, BOX_HIGH_IN)
        axes.broken_barh(boxes, lane, facecolors=colors, edgecolors=PAPER, linewidths=0.8)
        axes.text(0.12, middle, format.name, va="center", fontsize="large")
        axes.text(0.12, top - 0.42, f"{format.width_bits} bits", va="center", color=MUTED)
        words = formula(format, pattern)
        if patterns is None:
            words += _error(value, format.decode(pattern))
        axes.text(LEFT_IN, top - 0.42, words, va="center")
    leading = any(format.leading_bit for format in chosen)
    fields = [name for name in SET if name != "leading bit" or leading]
    axes.legend(
        handles=[Patch(facecolor=SET[name], label=name) for name in fields], loc="upper left",
        bbox_to_anchor=(LEFT_IN / width_in, 1.0), ncols=len(fields), borderaxespad=0.6,
        borderpad=0, handlelength=1, fontsize=SMALL_PT,
    )  # fmt: skip
    return figure


def formula(format: Format, pattern: int) -> str:
    """The formula that the bits encode, such as + 2^(15 - 15) × (1 + 512/1024) = 1.5."""
    sign, exponent, leading, fraction = format.fields(pattern)
    plus_or_minus = "−" if sign else "+"
    kind = format.kind(pattern)
    match kind:
        case "nan":
            return "NaN: not a number"
        case "infinity":
            return f"{plus_or_minus} infinity"
        case "zero":
            return f"{plus_or_minus} 0"
    power = f"$2^{{{max(exponent, 1)}-{format.bias}}}$"
    numbers = 2**format.fraction_bits
    value, significand = format.decode(pattern), f"({leading} + {fraction}/{numbers})"
    digits = 8
    if format.fraction_bits > 23:
        significand, digits = decimal(leading + Fraction(fraction, numbers), 17), 17
    small = "   (subnormal)" if kind == "subnormal" else ""
    return f"{plus_or_minus} {power} × {significand} = {decimal(value, digits)}{small}"


def _error(value: Exact | int, rounded: Exact) -> str:
    """The rounding error as text."""
    try:
        error = Fraction(rounded) - Fraction(value)
    except (ValueError, OverflowError):  # an infinity or a NaN
        return ""
    if not error:
        return "   (exact)"
    relative = f", relative {decimal(abs(error / Fraction(value)), 2)}" if value else ""
    return f"   error {decimal(abs(error), 2)}{relative}"


def field_of(format: Format, place: int) -> str:
    """The field of the bit at `place`; the sign bit is at place 0."""
    if place == 0:
        return "sign"
    if place <= format.exponent_bits:
        return "exponent"
    first = place == format.exponent_bits + 1
    return "leading bit" if format.leading_bit and first else "fraction"
