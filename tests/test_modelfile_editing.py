"""Changing an existing Modelfile: the rest of it stays as it is, byte for byte."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2.errors import ModelfileError
from dflash2.modelfiles import Modelfile, set_values

SOURCE = b"""# my model
FROM ./old.gguf   \t
  # sampling
  PARAMETER temperature 0.7
PARAMETER stop "<a>"
PARAMETER stop <b>
SYSTEM \"\"\"one
two\"\"\"
# the end"""


def test_a_draft_goes_behind_from_and_all_else_stays():
    edited = set_values(SOURCE, "draft", ["/d.gguf"])
    assert edited == SOURCE.replace(b"   \t\n", b"   \t\nDRAFT /d.gguf\n")
    assert set_values(edited, "draft", ["/d.gguf"]) == edited
    assert set_values(edited, "draft", ["/ e.gguf "]) == edited.replace(b"DRAFT /d.gguf", b'DRAFT "/ e.gguf "')


def test_a_value_is_replaced_in_its_place():
    assert set_values(SOURCE, "model", ["/n.gguf"]) == SOURCE.replace(b"./old.gguf   \t", b"/n.gguf")
    assert set_values(SOURCE, "temperature", ["1"]) == SOURCE.replace(b"temperature 0.7", b"temperature 1")
    assert set_values(SOURCE, "system", ["x\ny"]) == SOURCE.replace(b'"""one\ntwo"""', b'"x\ny"')


def test_surplus_commands_go_with_their_lines():
    assert set_values(SOURCE, "stop", ["<b>"]) == SOURCE.replace(b'stop "<a>"\nPARAMETER stop <b>\n', b"stop <b>\n")
    assert set_values(SOURCE, "temperature", []) == SOURCE.replace(b"  PARAMETER temperature 0.7\n", b"")


def test_further_values_follow_the_last_and_new_ones_go_to_the_end():
    assert set_values(SOURCE, "stop", ["<a>", "<b>", "c"]) == SOURCE.replace(b"<b>\n", b"<b>\nPARAMETER stop c\n")
    assert set_values(SOURCE, "num_ctx", ["8"]) == SOURCE + b"\nPARAMETER num_ctx 8\n"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_line_ends_are_those_of_the_file(newline):
    source = SOURCE.replace(b"\n", newline)
    edited = set_values(source, "draft", ["/d"])
    assert edited == source.replace(b"   \t" + newline, b"   \t" + newline + b"DRAFT /d" + newline)


@pytest.mark.parametrize(
    ("mark", "encoding"), [(b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")]
)
def test_encoding_and_mark_are_those_of_the_file(mark, encoding):
    edited = set_values(mark + "FROM é\nSYSTEM 漢".encode(encoding), "draft", ["/ü"])
    assert edited == mark + "FROM é\nDRAFT /ü\nSYSTEM 漢".encode(encoding)


def test_bytes_that_are_no_text_stay():
    assert set_values(b"FROM a\n# \xff\xfe\xe2\x82\nSYSTEM \xff", "draft", ["/d"]) == (
        b"FROM a\nDRAFT /d\n# \xff\xfe\xe2\x82\nSYSTEM \xff"
    )
    with pytest.raises(ModelfileError, match="half a character of UTF-16"):
        set_values(b"\xff\xfe" + "FROM a".encode("utf-16-le") + b"x", "draft", ["/d"])


def test_errors_come_through():
    with pytest.raises(ModelfileError, match="no FROM line"):
        set_values(b"DRAFT d\n", "draft", ["/d"])
    with pytest.raises(ModelfileError, match=r"DRAFT holds the character U\+200B"):
        set_values(SOURCE, "draft", ["/\u200bd"])


_lines = st.sampled_from(
    ["FROM a", "from b ", "DRAFT d", "PARAMETER stop x", 'PARAMETER stop "x y "', "  PARAMETER num_ctx 1 ", "# c", "",
     'SYSTEM "a\nb"', 'SYSTEM """a"\n"""', "MESSAGE user hi", "MESSAGE assistant ", "\t# d", "LICENSE \u00a0x\ufffd",
     "\u00a0DRAFT e", "PARAMETER draft z", "SYSTEM "]
)  # fmt: skip
_sources = st.builds(
    lambda lines, newline, last: newline.join(["FROM a", *lines]) + (newline if last else ""),
    st.lists(_lines, max_size=8),
    st.sampled_from(["\n", "\r\n", "\r", "\n\n"]),
    st.booleans(),
)
_encodings = st.sampled_from([(b"", "utf-8"), (b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le")])
_names = st.sampled_from(["model", "draft", "stop", "num_ctx", "system", "message", "license", "template"])
_values = st.lists(
    st.one_of(
        st.sampled_from(["x", "x y ", "", "user: hi", "user: a\nb", 'a"', '"a"\n', "a\r\nb", 'q"\nr"""\n']), st.text()
    ),
    max_size=3,
)


@settings(max_examples=800, deadline=None)
@given(_sources, _encodings, _names, _values)
def test_the_edited_text_parses_to_the_edited_model(text, encoding, name, values):
    mark, codec = encoding
    source = mark + text.encode(codec)
    before = Modelfile.parse(source)
    try:
        edited = set_values(source, name, values)
    except ModelfileError:
        with pytest.raises(ModelfileError):
            before.with_values(name, values).render()
        return
    if name == "model" and not values:
        return
    after = before.with_values(name, values)
    assert Modelfile.parse(edited) == after
    assert after.values(name) == tuple(values)
    for line in text.replace("\r", "\n").split("\n"):
        if line.lstrip().startswith("#"):
            assert line.encode(codec) in edited
    if before.values(name) == tuple(values):
        assert edited == source
