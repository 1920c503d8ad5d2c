"""Ollama's Modelfile grammar: its own answers, and what we write read back as the same."""

import json
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash2.errors import ModelfileError
from dflash2.modelfiles import ROLES, Command, Modelfile

CASES = json.loads((Path(__file__).parent / "data" / "modelfile_cases.json").read_text(encoding="utf-8"))["cases"]
KEYWORDS = ["license", "template", "system", "adapter", "draft", "renderer", "parser", "requires"]
NO_COMMAND = (
    'command must be one of "from", "license", "template", "system", "adapter", "draft", "renderer", "parser",'
    ' "parameter", "message", or "requires"'
)


def model(*commands: tuple[str, str]) -> Modelfile:
    return Modelfile(tuple(Command(*command) for command in commands))


def pairs(source: str | bytes) -> list[tuple[str, str]]:
    return [(command.name, command.args) for command in Modelfile.parse(source).commands]


def value_of(text: str) -> str:
    """The value of the one SYSTEM whose argument is spelled `text`."""
    (system,) = Modelfile.parse(f"FROM a\nSYSTEM {text}\n").values("system")
    return system


def error_of(source: str | bytes) -> str:
    with pytest.raises(ModelfileError) as caught:
        Modelfile.parse(source)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=[repr(case["input"][:40]) for case in CASES])
def test_every_case_is_answered_as_ollama_does(case):
    if "error" in case:
        assert error_of(case["input"]) == case["error"]
        return
    parsed = Modelfile.parse(case["input"])
    assert [[command.name, command.args] for command in parsed.commands] == case["commands"]
    assert parsed.render() == case["rendered"]
    assert Modelfile.parse(case["input"].encode()) == parsed


# Text made of what the grammar cares about, and of anything at all.
_pieces = st.sampled_from(
    ['"', '""', '"""', "\n", "\r", "\r\n", " ", "\t", "#", "a", "user: ", "FROM ", "\u00a0", "\u200b", "\x00", "\x07",
     "\u0085", "\u2028", "\ufeff", "\ufffd", "\ud800", "é", "\U0001fa77", "\\", "'", ";"]
)  # fmt: skip
_texts = st.one_of(st.lists(_pieces, max_size=12).map("".join), st.text(), st.text(st.characters()))
_names = st.one_of(
    st.sampled_from(["model", "message", "stop", "num_ctx", "", "from", "parameter", "FROM", "SYSTEM", *KEYWORDS]),
    st.from_regex(r"[A-Za-z0-9_]*", fullmatch=True),
    st.text(max_size=4),
)
_messages = st.tuples(st.sampled_from(["user", "assistant", "system", "User", ""]), _texts)
_commands = st.one_of(
    st.builds(Command, _names, _texts),
    st.builds(lambda message: Command("message", ": ".join(message)), _messages),
)
_files = st.lists(_commands, max_size=6).map(lambda found: Modelfile((Command("model", "a"), *found)))


@settings(max_examples=600, deadline=None)
@given(_files)
@example(model(("model", ' "x" '), ("message", "no role"), ("", "x"), ("stop", '"""')))
def test_what_is_written_reads_back_equal_or_is_refused(file):
    try:
        written = file.render()
    except ModelfileError as error:
        assert str(error).endswith(".")
        return
    assert Modelfile.parse(written) == file
    assert Modelfile.parse(written.encode()) == file
    assert Modelfile.parse(b"\xef\xbb\xbf" + written.encode()) == file
    assert Modelfile.parse(b"\xff\xfe" + written.encode("utf-16-le")) == file
    assert Modelfile.parse(b"\xfe\xff" + written.encode("utf-16-be")) == file


_sources = st.lists(
    st.one_of(
        st.sampled_from(["FROM ", "from\t", "PARAMETER ", "MESSAGE user ", "SYSTEM ", "LICENSE ", "DRAFT ", "stop "]),
        _pieces,
        st.text(max_size=3),
    ),
    max_size=24,
).map(lambda parts: "FROM a\n" + "".join(parts))


@settings(max_examples=1000, deadline=None)
@given(_sources)
def test_whatever_parses_can_be_written_again(source):
    try:
        parsed = Modelfile.parse(source)
    except ModelfileError:
        return
    if any(role not in ROLES for role, _ in parsed.messages):
        return  # PARAMETER message ...: a message without a role
    assert Modelfile.parse(parsed.render()) == parsed


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(), st.binary().map(b"FROM a\nSYSTEM ".__add__), st.binary().map(b"\xff\xfe".__add__)))
def test_any_bytes_are_a_modelfile_or_one_error(source):
    try:
        parsed = Modelfile.parse(source)
    except ModelfileError:
        return
    assert Modelfile.parse(parsed.render()) == parsed


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('"""a\r\nb"""', "a\r\nb"),  # both bytes of a line end stay
        ('" a "', " a "),
        ('"\u00a0a"\u200b', "a"),  # what does not print is gone before quotes are looked at
        ('"\u200b""a"""', "a"),
        ('"""""""', '"'),
        ('""""', None),
        ('"', None),
        ('"""', None),
        ('"""""', None),
        ('""', ""),
        ('"a" \t', "a"),
        ('"a"\n', "a"),
        ("a\x0bb\x0cc", "abc"),
        ("a\u3000b\u2003c", "abc"),
        ("a\ufeffb", "ab"),
        ("a\U0001fa77b", "a\U0001fa77b"),  # of Unicode 15
        ("a\ue000b\u00adc", "abc"),  # private use, soft hyphen
    ],
)
def test_where_a_value_ends_and_what_stays_of_it(written, value):
    if value is None:
        assert error_of(f"FROM a\nSYSTEM {written}\n") == "unexpected EOF"
    else:
        assert value_of(written) == value


def test_a_quote_that_is_not_closed_takes_the_lines_that_follow():
    source = 'SYSTEM "a" b\nFROM x\nPARAMETER stop "c"\nFROM y\n'
    assert pairs(source) == [("system", 'a" b\nFROM x\nPARAMETER stop "c'), ("model", "y")]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("FROM", "unexpected EOF"),
        ("FROM a\nPARAMETER num_ctx", "unexpected EOF"),
        ("FROM a\nPARAMETER num-ctx 1\n", "unexpected EOF: num"),
        ("FROM a\nPARAMETER num_ctx\n", "unexpected EOF: num_ctx"),
        ("FROM a\nPARAMETER ", "unexpected EOF"),
        ("FROM a\nMESSAGE user\n", "unexpected EOF: user"),
        ("FROM a\nMESSAGE us3r hi\n", "unexpected EOF: us"),
        ("FROM a\nMESSAGE user", "unexpected EOF"),
        ('FROM a\nMESSAGE user "x', "unexpected EOF"),
        ("FROM a\nMESSAGE badguy x\n", '(line 2): message role must be one of "system", "user", or "assistant"'),
        ("FROM a\r\nBOGUS x\r\n", f"(line 3): {NO_COMMAND}"),  # CR and LF count as one line each
        ("FROM a\n# c\n\nFROMM x", f"(line 4): {NO_COMMAND}"),
        ("FROM a\nFR\u00a0OM x", f"(line 2): {NO_COMMAND}"),
        ("FROM a\nSYSTEM \"x\ny\"\nBAD x", f"(line 4): {NO_COMMAND}"),
        ("#only", "no FROM line"),
        ("PARAMETER from x\n", "no FROM line"),
    ],
)  # fmt: skip
def test_errors_are_ollama_s_words(source, message):
    assert error_of(source) == message


def test_a_character_that_does_not_print_may_stand_before_a_command():
    assert pairs("\u00a0FROM a\n\u200bDRAFT d\n\ufeffSYSTEM s") == [("model", "a"), ("draft", "d"), ("system", "s")]


def test_a_parameter_with_the_name_of_a_command_is_that_command():
    assert pairs("PARAMETER model a\nPARAMETER system s\n") == [("model", "a"), ("system", "s")]
    assert Modelfile.parse("PARAMETER model a\nPARAMETER draft d\n").render() == "FROM a\nDRAFT d\n"


@pytest.mark.parametrize(
    ("source", "system"),
    [
        (b"FROM a\nSYSTEM \xe2\x82x\xff\xfe\n", "\ufffdx\ufffd\ufffd"),
        (b"\xef\xbb\xbfFROM a\nSYSTEM \xe2\x82x\n", "\ufffd\ufffdx"),  # behind a mark bytes count one by one
        (b"\xff\xfe" + "FROM a\nSYSTEM 漢".encode("utf-16-le") + b"x", "漢\ufffd"),
        (b"\xfe\xff" + "FROM a\nSYSTEM ".encode("utf-16-be") + b"\xdc\x00\xdc\x01\xd8\x00", "\ufffd\ufffd"),
        (b"\xff\xfe\xff\xfe" + "FROM a\nSYSTEM é".encode("utf-16-le"), "é"),  # a second mark is dropped
        ("\ufeffFROM a\nSYSTEM \ud800x".encode("utf-8", "surrogatepass"), "\ufffd\ufffd\ufffdx"),
        ("\ufeffFROM a\nSYSTEM \ud800x", "\ufffdx"),
    ],
)
def test_bytes_are_decoded_as_ollama_does(source, system):
    assert Modelfile.parse(source).values("system") == (system,)


def test_long_lines_and_many_lines_are_read_in_one_go():
    text = "x" * 1_000_000
    lines = "\n".join(["", '"', '""'] * 100_000)
    file = model(("model", "a"), ("system", text), ("template", lines + "end"))
    assert Modelfile.parse(file.render()) == file


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("system", "a\u00a0b", "SYSTEM holds the character U+00A0, which Ollama would drop; remove it from the value."),
        ("model", "/a\u202eb", "FROM holds the character U+202E, which Ollama would drop; remove it from the value."),
        ("stop", "\x1b", "PARAMETER stop holds the character U+001B, which Ollama would drop;"),
        ("system", 'a"""\nb"\nc', "SYSTEM holds lines that end in one and in three quotes"),
        ("num-ctx", "1", "'num-ctx' cannot be the name of a PARAMETER"),
        ("message", "User: hi", "A MESSAGE needs a role, system, user, assistant in lower case; 'User' is none."),
        ("message", "hi", "A MESSAGE needs a role"),
        ("from\n", "1", "'from\\n' cannot be the name of a PARAMETER"),
    ],
)
def test_what_no_text_keeps_is_refused(name, value, sentence):
    with pytest.raises(ModelfileError) as caught:
        model(("model", "a"), (name, value)).render()
    assert sentence in str(caught.value)


def test_a_modelfile_without_from_is_refused():
    with pytest.raises(ModelfileError, match="needs a FROM"):
        model(("draft", "d")).render()


@pytest.mark.parametrize(
    "path", ["/a b/c.gguf", " /a", "/a ", "/a#b", "#a", '"/a"', "/a\nb", "/a\r", "'a'", "/é/漢.gguf"]
)
def test_paths_survive(path):
    file = model(("model", path), ("draft", path))
    assert Modelfile.parse(file.render()) == file


def test_printing_is_that_of_unicode_15():
    """Python's own rule on its own version of Unicode: only what a version added may differ."""
    kept = set(value_of(f"x{''.join(map(chr, range(0x80, 0xD800)))}{''.join(map(chr, range(0xE000, 0x110000)))}y"))
    differing = {
        c for c in map(chr, [*range(0x80, 0xD800), *range(0xE000, 0x110000)]) if c.isprintable() != (c in kept)
    }
    if unicodedata.unidata_version == "15.0.0":
        assert differing == set()
    assert not differing & {"\u00a0", "\u00ad", "\u200b", "\u2028", "\u3000", "\ufeff", "\ufffd", "\ue000", "é", "漢"}
    assert len(differing) < 20_000


def test_typed_parameters_are_those_of_create():
    file = Modelfile.parse(
        "FROM a\nPARAMETER num_ctx +4096\nPARAMETER temperature .5\nPARAMETER top_p 0x1p-1\nPARAMETER use_mmap F\n"
        "PARAMETER stop a\nPARAMETER stop b\nPARAMETER num_ctx 8\nPARAMETER mirostat 1\nMESSAGE user hi: you\n"
    )
    assert file.parameters == {
        "num_ctx": 8, "temperature": 0.5, "top_p": 0.5, "use_mmap": False, "stop": ("a", "b")
    }  # fmt: skip
    assert file.messages == (("user", "hi: you"),)
    assert (file.value("num_ctx"), file.value("draft")) == ("8", None)


# What 32 bits hold at most, and halfway to the next power of two, where Go begins to refuse.
FLOAT32_MAX, FLOAT32_END = (2 - 2**-23) * 2.0**127, 2**128 - 2**103


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("num_ctx", "4k", "invalid int value [4k]"),
        ("num_ctx", "1_000", "invalid int value [1_000]"),
        ("num_ctx", "4096 # big", "invalid int value [4096 # big]"),
        ("seed", "9223372036854775808", "invalid int value [9223372036854775808]"),
        ("seed", "1" * 5000, f"invalid int value [{'1' * 5000}]"),
        ("num_ctx", "\u0664", "invalid int value [\u0664]"),
        ("top_p", "", "invalid float value []"),
        ("temperature", "0.7 # hot", "invalid float value [0.7 # hot]"),
        ("temperature", "1e39", "invalid float value [1e39]"),
        ("temperature", "1e999", "invalid float value [1e999]"),
        ("temperature", "-3.4028235677973367e38", "invalid float value [-3.4028235677973367e38]"),
        ("temperature", f"{FLOAT32_END}", f"invalid float value [{FLOAT32_END}]"),
        ("temperature", "0x1.ffffffp127", "invalid float value [0x1.ffffffp127]"),
        ("use_mmap", "yes", "invalid bool value [yes]"),
        ("", "num_ctx 1", "unknown parameter ''"),
        ("NUM_CTX", "1", "unknown parameter 'NUM_CTX'"),
        ("requires", "0.14.0.1", "requires must be a valid semver (e.g. 0.14.0)"),
        ("requires", "01.2", "requires must be a valid semver (e.g. 0.14.0)"),
        ("requires", "1.2-rc1", "requires must be a valid semver (e.g. 0.14.0)"),
    ],
)
def test_values_that_create_refuses(name, text, message):
    with pytest.raises(ModelfileError) as caught:
        model(("model", "a"), (name, text)).check_values()
    assert str(caught.value) == message


@pytest.mark.parametrize("version", ["0.14.0", "v0.14.0", "1", "1.2", "1.2.3-rc.1+b.01", "1.0.0-0a"])
def test_versions_that_create_takes(version):
    model(("model", "a"), ("requires", version)).check_values()


@pytest.mark.parametrize(
    ("text", "value"),
    [("-9223372036854775808", -(2**63)), ("+7", 7), ("0007", 7)],
)
def test_whole_numbers(text, value):
    assert model(("seed", text)).parameters == {"seed": value}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1_0.5e1", 105.0), ("1.", 1.0), ("-Inf", float("-inf")), ("1e-60", 1e-60), ("0X_1P+1", 2.0)),
        ("-3.4028235677973366e38", -FLOAT32_MAX),  # below halfway, although it is halfway in 64 bits
        (f"{FLOAT32_END - 1}.9", FLOAT32_MAX),
        ("3.40282356e38", 3.40282356e38),
        ("nan", pytest.approx(float("nan"), nan_ok=True)),
    ],
)
def test_fractions(text, value):
    assert model(("temperature", text)).parameters == {"temperature": value}


def test_the_example_of_the_docs_holds():
    docs = (Path(__file__).parents[1] / "docs" / "ollama.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from dflash2.modelfiles import Modelfile.*?)```", docs, re.DOTALL)
    exec(example, {})
