"""Tests of reading models from texts without Keras: parameters, shapes, types, distances, macros and names."""

import re
from pathlib import Path

import pytest

from ddlf.errors import NotationError
from ddlf.extras.text.language.graph import distances
from ddlf.extras.text.language.model import MAX_BYTES, load, read
from ddlf.extras.text.language.operators import OPERATORS
from tests.extras.text.language.texts import DENSE, DIGITS, HEADS, LM, SQUARE, text_of
from tests.processes import python


def operators(text):
    return [node.operator for node in read(text).graph.nodes]


def shapes(text):
    return [node.shape for node in read(text).graph.nodes]


def parameters(text):
    return {parameter.name: parameter.shape for node in read(text).graph.nodes for parameter in node.parameters}


def distances_of_parameters(text):
    graph = read(text).graph
    pairs = zip(graph.nodes, distances(graph), strict=True)
    return {
        parameter.name: (begun, remaining + 1) for node, (begun, remaining) in pairs for parameter in node.parameters
    }


def mlp(*sizes):
    layers = ", ".join(f"dense(shape=[{size}], activation=relu)" for size in sizes[1:])
    return text_of(layers, f"[{sizes[0]}]", f"[{sizes[-1]}]")


def test_parameters_have_order_and_distances():
    model = read(DIGITS)
    assert model.graph.parameters == 4546
    far = {"w1": (1, 9), "b1": (2, 8), "w2": (4, 6), "b2": (5, 5), "w3": (7, 3), "b3": (8, 2)}
    assert list(distances_of_parameters(DIGITS).items()) == list(far.items())
    assert parameters(DIGITS)["w2"] == (48, 24)
    assert [(head.name, head.loss) for head in model.graph.heads] == [("digits", "SCE")]
    assert model.warnings == ()


@pytest.mark.parametrize("count", [1, 5])
def test_distances_sum_to_three_edges_per_layer_and_one(count):
    far = distances_of_parameters(mlp(*[4] * (count + 1)))
    assert {sum(pair) for pair in far.values()} == {3 * count + 1}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (mlp(784, 128, 80, 40, 10), 114450),
        (mlp(4, 3, 3), 27),
        (HEADS, 2443),
        (LM, 99968),
        (
            text_of("dense(shape=[8], activation=relu, name=first), dense(shape=[8], activation=relu), residual(to=first), "
                "dense(shape=[3], activation=softmax)", after="[3]"),
            171,
        ),
    ],
)  # fmt: skip
def test_parameter_count_equals_the_one_by_hand(text, count):
    assert read(text).graph.parameters == count


def test_cast_is_inserted_before_an_output_of_a_higher_type():
    model = read(SQUARE)
    assert [(node.operator, node.dtype) for node in model.graph.nodes] == [
        ("input", "int32"), ("cast", "float16"), ("add", "float16"), ("pow", "float16"), ("cast", "float32"),
    ]  # fmt: skip
    assert model.warnings == ()


def test_cast_to_a_lower_type_warns_unless_written():
    text = "a:input shape=[2]; a:output int32 shape=[2]; a:layers {};"
    warnings = read(text.format("relu()")).warnings
    assert [(warning.line, warning.column) for warning in warnings] == [(1, 20)]
    assert "float32 becomes int32" in warnings[0].sentence
    assert read(text.format("cast(int32)")).warnings == ()


def test_softmax_and_parameters_stay_float32_unless_written():
    text = "a:input float16 shape=[2]; a:output shape=[2]; a:layers matmul(w{}), softmax();"
    graph = read(text.format("")).graph
    assert [(node.operator, node.dtype) for node in graph.nodes[1:]] == [
        ("matmul", "float16"), ("cast", "float32"), ("softmax", "float32"),
    ]  # fmt: skip
    assert graph.nodes[1].parameters[0].dtype == "float32"
    assert read(text.format(", float16")).graph.nodes[1].parameters[0].dtype == "float16"


def test_float16_and_bfloat16_combine_to_float32():
    text = "a:input float16 shape=[2]; b:input bfloat16 shape=[2]; b:layers add(to=a); b:output shape=[2];"
    assert [node.dtype for node in read(text).graph.nodes if node.operator in ("cast", "add")] == ["float32"] * 3


def test_shapes_flow_backwards_from_macro_and_output():
    assert parameters(text_of("matmul(w), tanh(shape=[6]), matmul(w)", "[3]", more="")) == {"w1": (3, 6), "w2": (6, 8)}
    assert parameters(text_of("matmul(w), relu()", "[3]", "[5]", "")) == {"w1": (3, 5)}


def test_shapes_option_makes_one_copy_per_shape():
    assert shapes(text_of("dense(shapes=[[5],[7],[8]], activation=relu)"))[1::3] == [(5,), (7,), (8,)]


def test_option_replaces_the_layer_of_its_name():
    text = text_of("dense(shape=[8], activation=leakyRelu(alpha=0.3))")
    last = read(text).graph.nodes[-1]
    assert (last.operator, [(arg.key, arg.value.value) for arg in last.options]) == ("leakyRelu", [("alpha", 0.3)])
    assert operators(text_of("dense(shape=[8], activation=twice)", more=DENSE + "twice:layers relu(), tanh();"))[
        -2:
    ] == [
        "relu",
        "tanh",
    ]


def test_options_apply_inside_and_inner_ones_override():
    more = DENSE + "two:layers dense(activation=tanh), dense(shape=[8]);"
    model = text_of("two(shape=[5], activation=relu)", more=more)
    assert operators(model)[3::3] == ["tanh", "relu"]
    assert shapes(model)[3::3] == [(5,), (8,)]


def test_option_without_effect_warns():
    more = DENSE + "two:layers dense(shape=[8], activation=tanh);"
    (warning,) = read(text_of("two(activation=relu)", more=more)).warnings
    assert "has no effect" in warning.sentence


def test_residual_adds_the_input_of_its_macro():
    graph = read(text_of("relu(), skip(), tanh()", more="skip:layers sin(), cos(), residual();")).graph
    assert graph.nodes[4].operator == "residual"
    assert graph.nodes[4].inputs == (3, 1)


def test_macro_names_are_visible_only_inside():
    more = "skip:layers sin(name=x), cos(), residual(to=x);"
    assert read(text_of("skip(), skip()", more=more)).graph.nodes[6].inputs == (5, 4)
    with pytest.raises(NotationError, match="nothing above is called 'x'"):
        read(text_of("skip(), residual(to=x)", more=more))


def test_layers_without_a_path_to_an_output_are_removed():
    text = DIGITS + "spare:from digits; spare:layers matmul(w, shape=[99]);"
    assert read(text).graph == read(DIGITS).graph
    warnings = read(DIGITS + "other:input shape=[3];").warnings
    assert "leads to no output" in warnings[0].sentence


def test_concat_joins_several_inputs():
    text = "a:input shape=[3]; b:input shape=[5]; b:layers concat(to=a), matmul(w); b:output shape=[2];"
    assert parameters(text) == {"w1": (8, 2)}


def test_convolution_and_pool_shapes_follow_from_options():
    layers = (
        "conv2d(f, c, kernel=[3, 3], padding=[1, 1, 1, 1], shape=[8, 28, 28]), relu(), "
        "maxPool2d(windowDimensions=[2, 2], strides=[2, 2]), conv2d(f, shape=[4, 12, 12]), averagePool2d(), reshape(shape=[4])"
    )
    text = text_of(layers, "[1, 28, 28]", "[4]", "")
    assert parameters(text) == {"f1": (8, 1, 3, 3), "c1": (8,), "f2": (4, 8, 3, 3)}
    assert shapes(text)[1:] == [(8, 28, 28), (8, 28, 28), (8, 14, 14), (4, 12, 12), (4, 1, 1), (4,)]


def test_recurrent_parameters_have_a_slice_per_gate():
    text = text_of("lstm(w, r, b, shape=[7])", "[20, 3]", "[7]", "")
    assert parameters(text) == {"w1": (28, 3), "r1": (28, 7), "b1": (28,)}


def test_keras_layers_have_the_parameter_count_of_keras():
    layers = "Conv2D(filters=32, kernel_size=3, activation=relu), MaxPooling2D(pool_size=2), BatchNormalization(), Flatten(), Dense(units=10)"
    text = text_of(layers, "[28, 28, 1]", "[10]", "")
    assert read(text).graph.parameters == (9 * 32 + 32) + 4 * 32 + (13 * 13 * 32 * 10 + 10)


def test_unknown_layer_leaves_the_count_open():
    assert read(text_of("own>Mine(units=3), Dense(units=8)", more="")).graph.parameters is None


@pytest.mark.parametrize(
    "layer",
    ["Conv2D(filters=4, kernel_size=1.5)", "Reshape(target_shape=3)", "MaxPooling2D(pool_size=many)"],
)
def test_invalid_arguments_leave_shapes_and_counts_open(layer):
    text = text_of(f"{layer}, Dense(units=8)", "[5, 4, 3]", "[5, 4, 8]", "")
    assert read(text).graph.nodes[1].shape is None
    assert read(text).graph.parameters is None


@pytest.mark.parametrize("text", [DIGITS, SQUARE, HEADS, LM])
def test_byte_order_mark_and_line_ends_change_nothing(text):
    assert read(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()).graph == read(text).graph


def test_read_refuses_large_or_binary_files(tmp_path):
    with pytest.raises(NotationError, match="longer than 262,144 bytes"):
        read(b" " * (MAX_BYTES + 1))
    with pytest.raises(NotationError, match=r"m:2:3: byte 0xff is.* UTF-8"):
        read(b"#\n##\xff", "m")
    with pytest.raises(NotationError, match="cannot be read: No such file"):
        load(tmp_path / "none.nnm")


def test_read_reports_two_errors():
    with pytest.raises(NotationError) as caught:
        read(text_of("rellu(), dense(shape=[0], activation=relu)") + "b:input shape=[3")
    assert [(line, column) for line, column, _ in caught.value.problems] == [(2, 10), (2, 32), (4, 15)]


def test_read_imports_lark_but_neither_numpy_nor_keras():
    code = (
        "import sys, ddlf.extras.text.language.model as m\nprint('lark' in sys.modules)\n"
        "m.read('a:input shape=[1]; a:output shape=[1];')\n"
        "print([n for n in ('numpy', 'keras', 'tensorflow', 'asyncio') if n in sys.modules], 'lark' in sys.modules)"
    )
    assert python(code) == "False\n[] True\n"


def test_notation_page_lists_every_operator():
    page = (Path(__file__).parents[4] / "docs/reference/notation.md").read_text()
    assert set(OPERATORS) - set(re.findall(r"\w+", page.partition("## Operators")[2])) == set()
    texts = re.findall(r"^```text\n(.*?)^```", page, re.S | re.M)
    assert [read(text).graph.parameters for text in texts] == [4546, None]
