"""Tests of wrong texts.

In each row, ``~`` marks the character that the error must name. The second value is the expected word of the error.
"""

import pytest

from ddlf.errors import NotationError
from ddlf.extras.text.language.model import read
from tests.extras.text.language.texts import DENSE, text_of

IN = "a:input shape=[8]; a:output shape=[8];\n"
WRONG = [
    # misspelt words
    (IN + "a:layers ~rellu();", "'relu'"),
    (IN + "a:layers ~Relu();", "'ReLU'"),
    (IN + "a:layers ~sigmoidd();", "'sigmoid'"),
    (IN + "a:layers ~softMax();", "'softmax'"),
    (IN + "a:layers ~leaky_relu();", "'leakyRelu'"),
    (IN + "a:layers ~batchnorm();", "'batchNorm'"),
    (IN + "a:layers ~matmull(w);", "'matmul'"),
    (IN + "a:layers ~dens(shape=[8], activation=relu);\n" + DENSE, "'dense'"),
    (IN + "a:layers ~dense(shape=[8]);", "'Dense'"),
    (IN + "a:layers ~Dens(units=8);", "'Dense'"),
    (IN + "a:layers ~ad(b);", "'add'"),
    (IN + "a:layers ~rleu();", "'relu'"),
    (IN + "a:layers Dense(units=~eight);", "units must be a whole number of 1 or more"),
    (IN + 'a:layers LSTM(units=~"8");', "units must be a whole number of 1 or more"),
    ("a:input shape=[4, 8]; a:output shape=[4, 8];\na:layers ~attend(1, 2, 3);", "write names, and no number"),
    (IN + "a:loss ~categorical_crossentropy;", "'CCE'"),
    (IN + "a:layers ~Conv2d(filters=8);", "'Conv2D'"),
    (IN + "a:layers Dense(~unit=8);", "'units'"),
    (IN + "a:layers Dense(units=8, ~activaton=relu);", "'activation'"),
    (IN + "a:layers dense(shape=[8], ~activaton=relu);\n" + DENSE, "'activation'"),
    (IN + "a:layers dense(shape=[8], activation=~rellu);\n" + DENSE, "'relu'"),
    (IN + "a:layers dense(~shap=[8], activation=relu);\n" + DENSE, "'shape'"),
    (IN + "a:layers leakyRelu(~alfa=0.1);", "'alpha'"),
    (IN + "a:layers softmax(~axes=0);", "'axis'"),
    (IN + "a:layers cast(~flot16);", "'float16'"),
    (IN + "a:layers cast(~double);", "no type"),
    (IN + "a:~layer relu();", "'layers'"),
    (IN + "a:~los MSE;", "'loss'"),
    (IN + "a:loss ~MES;", "'MSE'"),
    (IN + "a:loss ~mse;", "'MSE'"),
    ("a:~inputs shape=[8]; a:output shape=[8];", "'input'"),
    ("a:input ~flaot32 shape=[8]; a:output shape=[8];", "'float32'"),
    ("a:input ~Float32 shape=[8]; a:output shape=[8];", "'float32'"),
    ("a:input ~sape=[8]; a:output shape=[8];", "'shape'"),
    (IN + "a:layers relu(name=first), residual(to=~frist);", "'first'"),
    (IN + "b:from ~c; b:output shape=[8];", "no block"),
    ("trunk:input shape=[8]; b:from ~trunc; b:output shape=[8];", "'trunk'"),
    (IN + "~trian:data digits;", "did you mean 'train'?"),
    (IN + "a:layers attend(q, k, v, mask=~casual);", "'causal'"),
    (IN + "a:layers relu(), add(skip), residual(to=~skip), tanh(name=skip);", "nothing above"),
    (IN + "a:layers relu(name=skip), add(~skip);", "'to=skip'"),
    # punctuation
    ("a~ input shape=[8];", "':' is missing"),
    ("a:input shape=[8]~\na:output shape=[8];", "';' is missing"),
    ("a:input shape=[8]; a:output shape=[8]~", "';' is missing at the end"),
    ("a:input shape=~[8; a:output shape=[8];", "not closed"),
    ("a:input shape=[8]~]; a:output shape=[8];", "closes no bracket"),
    ("a:input shape=[8~); a:output shape=[8];", "']'"),
    ("a:input shape ~[8]; a:output shape=[8];", "'shape=['"),
    ("a:input ~[8]; a:output shape=[8];", "'shape=[...]'"),
    ("a:input shape=~8; a:output shape=[8];", "'shape=[8]'", ),
    (IN + "a:layers ~relu;", "'relu()'"),
    (IN + "a:layers relu() ~tanh();", "',' is missing"),
    (IN + "a:layers relu(),~, tanh();", "',' is not allowed here"),
    (IN + "a:layers leakyRelu(alpha~:0.1);", "'='"),
    (IN + "a:layers leakyRelu(alpha=~);", "a number"),
    (IN + 'a:name ~"first;', "not closed"),
    (IN + "a:name ~'first';", "'\"'"),
    (IN + "a:layers r~еlu();", "'e'"),
    (IN + "a:layers relu(~）;", "not closed", "("),
    (IN + "a:layers ~__class__();", "begins with a letter"),
    (IN + "a:layers relu(~@);", "'@'"),
    (IN + "a:layers add(~1.2.3);", "'1.2.3' is not a number"),
    (IN + "a:layers add(~2x);", "'2x' is not a number"),
    (IN + "~; a:layers relu();", "ends no statement"),
    (IN + "a:~layers ;", "no value"),
    (IN + "a:layers ~3;", "a layer must stand here"),
    # sizes and values
    ("a:input shape=[~0]; a:output shape=[8];", "a size must be"),
    ("a:input shape=[~-1]; a:output shape=[8];", "a size must be"),
    ("a:input shape=[~2147483648]; a:output shape=[8];", "a size must be"),
    ("a:input shape=[~1.5]; a:output shape=[8];", "a size must be"),
    ("a:input shape=~[]; a:output shape=[8];", "has an empty shape"),
    (IN + "a:layers dense(shapes=[~[]], activation=relu);\n" + DENSE, "has an empty shape"),
    (IN + "a:layers dense(shapes=~[], activation=relu);\n" + DENSE, "list of shapes"),
    (IN + "a:layers dropout(p=~1.5);", "p must be"),
    (IN + "a:layers relu(lrm=~0);", "lrm must be"),
    (IN + "a:layers softmax(axis=~one);", "axis must be a whole number"),
    (IN + "a:layers add(~1" + "0" * 50 + ");", "too large"),
    ("a:input int32 shape=[8]; a:output shape=[8]; a:layers add(~1.5);", "is not a valid int32"),
    ("a:input uint8 shape=[8]; a:output shape=[8]; a:layers add(~256);", "is not a valid uint8"),
    ("a:input shape=[1000000000]; a:output shape=[1000]; a:layers ~matmul(w);", "10,000,000,000 parameters"),
    (IN + "a:layers resample2d(scales=~2);", "scales must be"),
    ("a:input shape=[3, 8, 8]; a:output shape=[3, 6, 6]; a:layers ~conv2d(f, kernel=[3]);", "2 numbers, got 1"),
    # parts that do not fit together
    ("a:input shape=[8]; ~a:output shape=[9]; a:layers relu();", "shape [9]"),
    (IN + "a:layers ~matmul(w), matmul(w);", "write shape="),
    (IN + "a:layers matmul(w, shape=[9]), ~residual(), matmul(w);", "do not fit"),
    (IN + "a:layers ~softmax(axis=1);", "no axis 1"),
    (IN + "a:layers ~reshape(shape=[3]), matmul(w);", "8 values"),
    (IN + "a:layers ~maxPool2d();", "3 axes"),
    (IN + "a:layers ~relu(w);", "no operand"),
    (IN + "a:layers ~add();", "takes 1"),
    (IN + "a:layers ~concat();", "needs to="),
    (IN + "a:layers relu(name=x), ~add(to=[x, x]);", "one layer or block with to=, got 2"),
    (IN + "a:layers relu(name=x), ~scatterND(to=x);", "to=[indices, updates]"),
    (IN + "a:layers ~gatherElements();", "needs to="),
    (IN + "a:layers gather(~w);", "a whole number"),
    (IN + "a:layers ~gather(8);", "no 8 among 8"),
    (IN + "a:layers relu(name=x), ~gather(to=x);", "write cast(int32)"),
    (IN + "i:input int32 shape=[2, 1]; n:input float16 shape=[2]; a:layers ~scatterND(to=[i, n]);", "write cast(float32)"),
    (IN + "i:input int32 shape=[2, 3]; a:layers ~gatherND(to=i);", "go into 1 axes"),
    (IN + "a:layers split(splits=~two);", "splits must be"),
    (IN + "a:layers ~split(splits=3);", "cannot be split into 3"),
    (IN + "a:layers ~split(splits=[4, 4], index=2);", "no part 2"),
    (IN + "a:layers ~quantizeLinear(1, 0, float16);", "whole numbers"),
    (IN + "a:layers matmul(w, shape=[~none_, 8]);", "a size must be"),
    (IN + "a:layers ~dense(shape=[8]);\n" + DENSE, "activation=relu"),
    # duplicate, cyclic, missing and forbidden parts
    (IN + "a:layers relu(); ~a:layers tanh();", "first at line 2"),
    (IN + "a:layers dense(shape=[8], ~shape=[8], activation=relu);\n" + DENSE, "given twice"),
    (IN + "a:layers relu(name=x), tanh(~name=x);", "given twice"),
    (IN + "a:layers t~\N{CYRILLIC SMALL LETTER A}nh();", "did you mean 'a'?"),
    ("~a:input shape=[8]; a:layers relu();", "no block has an output"),
    ("~# only a comment", "no block with an input"),
    ("a:input shape=" + 20 * "[" + "~" + 99_980 * "[", "nested deeper than 20"),
    (IN + "a:layers b(); b:layers c(); c:layers ~b();", "calls itself"),
    ("a:from b; a:output shape=[8]; b:from ~a; c:input shape=[8]; c:output shape=[8];", "own end"),
    ("~a:output shape=[8]; a:layers relu();", "nothing goes in"),
    (IN + "~relu:layers tanh();", "cannot be called"),
    (IN + "~Dense:layers tanh();", "cannot be called"),
    (IN + "a:layers ~Lambda(function=f);", "never runs code"),
    (IN + "a:layers ~keras>Lambda(function=f);", "never runs code"),
    (IN + "a:layers TimeDistributed(layer=~Lambda(function=f));", "never runs code"),
    ("~", "no block with an input"),
]  # fmt: skip


@pytest.mark.parametrize("row", WRONG, ids=[str(number) for number in range(1, len(WRONG) + 1)])
def test_error_names_the_place_and_the_meant_word(row):
    before, _, after = row[0].partition("~")
    position = (before.count("\n") + 1, len(before) - before.rfind("\n"))
    with pytest.raises(NotationError) as caught:
        read(before + after, "m.nnm")
    sentences = {(line, column): sentence for line, column, sentence in caught.value.problems}
    if len(row) == 2:
        assert position in sentences, str(caught.value)
        assert row[1] in sentences[position]
        assert f"m.nnm:{position[0]}:{position[1]}: " in str(caught.value)


@pytest.mark.parametrize(
    "wrong", ["dense(shap=[8], activation=relu, name=x)", "leakyRelu(alfa=1, name=x)", "relu(name=x"]
)
def test_wrong_layer_is_not_reported_as_missing(wrong):
    with pytest.raises(NotationError) as caught:
        read(
            f"{IN}b:from a;\na:layers {wrong};\nc:from a; c:layers relu(), residual(to=x), residual(to=a); c:output shape=[8];{DENSE}"
        )
    assert "nothing above" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("(" * 100_000, "is not closed|deeper"),
        ("a:layers " + "[" * 100_000 + ";", "deeper"),
        ("a:x b;" * 6000, "at most"),
        ("a:layers " + "relu()," * 5000 + ";", "at most"),
        ("a:loss 1" + "0" * 5000 + ";", "too large"),
        (text_of("m1()", more="".join(f"m{n}:layers m{n + 1}(), m{n + 1}();" for n in range(1, 25)) + "m25:layers relu();"), "more than 10,000"),
        (text_of("m1()", more="".join(f"m{n}:layers m{n + 1}();" for n in range(1, 50)) + "m50:layers relu();"), "nested deeper"),
        ("".join(f"b{n}:from b{n + 1};" for n in range(100)) + "b100:input shape=[1]; b0:output shape=[1];", "more than 30 blocks"),
    ],
)  # fmt: skip
def test_limits_are_checked_before_work(text, sentence):
    with pytest.raises(NotationError, match=sentence):
        read(text)


def test_wrong_shape_is_reported_once():
    text = "a:input shape=[8]; a:output shape=[8]; a:layers dense(shapes=[[8], 8], activation=relu);\n" + DENSE
    with pytest.raises(NotationError) as error:
        read(text)
    assert [problem.sentence for problem in error.value.problems] == [
        "shapes has a list of sizes for each copy, did you mean '[8]'?"
    ]
