"""Tests that compare the engine in Chromium's WebAssembly with Keras. All tests share one browser."""

import json

import pytest
import pytest_asyncio

from ddlf.peers.browser import supported
from tests.later import Later
from tests.peers.browser.page import engine_page

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
models = Later("tests.peers.browser.models")
RUN = "async (text) => JSON.stringify(await engine.run(engine, JSON.parse(text)))"
STEPS = """async (text) => {
  const { graph, weights, batches: [{ inputs, labels }] } = JSON.parse(text);
  const [given, wanted] = [engine.opened(inputs), engine.opened(labels)], model = new engine.Model(graph), counts = [];
  model.setWeights(engine.openedWeights(weights));
  for (let n = 1; n <= 500; n++) {
    await model.train(given, wanted);
    await model.evaluate(given, wanted);
    if (n % 100 === 20) model.setWeights(await model.weights());
    if (n % 100 === 50) await model.predict(given);
    if (n === 100 || n === 500) counts.push(buffersInUse());
  }
  model.free();
  return [...counts, buffersInUse()];
}"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def page():
    async with engine_page() as page:
        yield page


@pytest.fixture(scope="module")
def cases():
    return list(models.all_cases())


async def wrong(page, cases):
    """Return the differences between the engine and Keras in all cases."""
    differences = []
    for case in cases:
        differences += case.wrong(json.loads(await page.evaluate(RUN, json.dumps(case.written))))
    return differences


async def test_engine_has_exactly_the_listed_names(page):
    names = await page.evaluate(
        """async () => {
          const from = async (file, name) => Object.keys((await import(`/engine/${file}.js`))[name]).sort();
          return {
            layers: await from("layers/index", "LAYERS"), activations: await from("activations", "ACTIVATIONS"),
            losses: await from("losses", "LOSSES"), optimizers: await from("optimizers", "OPTIMIZERS"),
            rates: await from("rates", "RATES"), metrics: engine.METRICS,
          };
        }"""
    )
    assert names["layers"] == sorted(supported.LAYERS)
    assert names["activations"] == sorted(supported.ACTIVATIONS)
    assert names["losses"] == sorted(row.kind for row in supported.LOSSES.values())
    assert names["optimizers"] == sorted(supported.OPTIMIZERS)
    assert names["rates"] == sorted([*supported.RATES, "constant"])
    assert {row.kind for row in supported.METRICS.values()} <= set(names["metrics"])


async def test_every_listed_part_has_a_case(cases):
    graphs = [case.written["graph"] for case in cases]
    assert set(supported.LAYERS) <= {layer["kind"] for graph in graphs for layer in graph["layers"]}
    losses = [loss for graph in graphs for loss in graph["losses"]]
    assert {row.kind for row in supported.LOSSES.values()} <= {loss["kind"] for loss in losses}
    measured = {metric["kind"] for loss in losses for metric in loss["metrics"]}
    assert {row.kind for row in supported.METRICS.values()} | {"accuracy_by_shape"} <= measured
    assert set(supported.OPTIMIZERS) <= {graph["optimizer"]["kind"] for graph in graphs}
    assert set(supported.RATES) <= {graph["optimizer"]["rate"]["kind"] for graph in graphs}


async def test_engine_has_the_results_of_keras(page, cases):
    assert await wrong(page, cases) == []


async def test_twenty_steps_on_mnist_differ_from_keras_by_rounding_only(page):
    assert await wrong(page, [models.mnist_case()]) == []


async def test_number_of_buffers_stays_constant_over_five_hundred_steps(page):
    case = models.compiled(
        *("memory", "categorical_crossentropy", models.one_hot),
        last="softmax",
        optimizer=models.keras.optimizers.Adam(0.01, clipnorm=1.0),
        metrics=["accuracy"],
    )
    before = await page.evaluate("buffersInUse()")
    early, late, after = await page.evaluate(STEPS, json.dumps(case.written))
    assert early > before
    assert late == early
    assert after == before


async def test_dropout_drops_its_share_and_keeps_the_sum(page):
    model = models.dropout_model(0.25)
    got = await page.evaluate(RUN, json.dumps(model.written))
    weights = models.unpacked(json.loads(got)["weights"]["dense/kernel"])
    dropped = (weights == 0).mean()
    assert 0.2 < dropped < 0.3
    assert weights[weights != 0] == pytest.approx(weights.max())


async def test_a_model_that_the_page_does_not_know_is_refused_by_name(page):
    case = models.compiled("refused", "mse", lambda rng: models.numbers(rng, 5, 3)).written
    for change, sentence in (
        (lambda graph: graph.update(format=2), "format 2: reload the page"),
        (lambda graph: graph["layers"][0].update(kind="Sparkle"), "no layer Sparkle"),
    ):
        graph = json.loads(json.dumps(case["graph"]))
        change(graph)
        text = await page.evaluate(
            "(text) => { try { new engine.Model(JSON.parse(text)); return ''; } catch (e) { return e.message; } }",
            json.dumps(graph),
        )
        assert sentence in text


async def test_page_has_printed_no_error(page):
    assert page.wrong == []
