"""Texts of models, with their expected results."""

DENSE = "dense:layers matmul(w), add(b), activation();\n"
DIGITS = (
    "digits:input shape=[64]; digits:output shape=[10]; digits:loss SCE;\n"
    "digits:layers dense(shapes=[[48],[24]], activation=relu), dense(shape=[10], activation=softmax);\n" + DENSE
)
SQUARE = "square:input int32 shape=[5]; square:output float32 shape=[5]; square:layers cast(float16), add(1), pow(2);"
HEADS = (
    """trunk:input shape=[64]; trunk:layers dense(shape=[32], activation=relu);
digit:from trunk; digit:output shape=[10]; digit:layers dense(shape=[10], activation=softmax);
parity:from trunk; parity:output shape=[1]; parity:layers dense(shape=[1], activation=sigmoid);
"""
    + DENSE
)
LM = """lm:input int32 shape=[96]; lm:layers Embedding(input_dim=256, output_dim=64), block(), block(), Dense(units=256); lm:output shape=[96,256];
block:layers mix(), feed(); mix:layers LayerNormalization(), attend(q, k, v, heads=4, mask=causal), residual();
feed:layers LayerNormalization(), Dense(units=128, activation=gelu), Dense(units=64), residual();
"""
KERAS = """siamese:model Functional(inputs=[left, right], outputs=score);
left:input int64 shape=[none] batch=2; left:layers Embedding(input_dim=20, output_dim=4, name=embed), tower();
right:input int64 shape=[none] batch=2 name="the right"; right:layers Embedding(share=embed), tower(), Dot(axes=-1, to=left, name="far apart");
score:from right; score:layers LSTM(units=2, return_state=true, call=with(it, initial_state=[it, it], mask=none)), part(1); score:output shape=[2];
tower:model Sequential(name=Tower, trainable=false); tower:input shape=[none, 4]; tower:layers GlobalAveragePooling1D(); tower:output shape=[4];
"""


def text_of(layers, before="[8]", after="[8]", more=DENSE):
    """Return the text of a model with one input and one output."""
    return f"a:input shape={before}; a:output shape={after};\na:layers {layers};\n{more}"
