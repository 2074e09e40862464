// Prints the processor time of a batch in TensorFlow.js on its cpu backend: node tfjs.cjs < task

const tf = require("@tensorflow/tfjs");
const task = JSON.parse(require("node:fs").readFileSync(0, "utf-8"));

// The layers of the graph, as TensorFlow.js names them.
function layerOf({ kind, config, weights }, shape) {
  const first = shape ? { inputShape: shape } : {}, size = (own, axis) => task.graph.weights.find(({ name }) => name === weights[own]).shape.at(axis);
  if (kind === "Conv2D") return tf.layers.conv2d({ ...first, kernelSize: config.kernel_size, filters: size("kernel", -1), activation: config.activation.kind });
  if (kind === "MaxPooling2D") return tf.layers.maxPooling2d({ poolSize: config.pool_size });
  if (kind === "Flatten") return tf.layers.flatten();
  return tf.layers.dense({ ...first, units: size("kernel", -1), activation: config.activation.kind });
}

async function main() {
  await tf.setBackend("cpu");
  const model = tf.sequential(), { inputs, labels, graph } = task;
  graph.layers.forEach((layer, n) => model.add(layerOf(layer, n ? null : inputs.shape.slice(1))));
  model.compile({ optimizer: tf.train.sgd(0.05), loss: "categoricalCrossentropy" });
  const x = tf.tensor(inputs.data, inputs.shape), y = tf.tensor(labels.data, labels.shape);
  const spent = () => { const { user, system } = process.cpuUsage(); return (user + system) / 1000; };
  await model.trainOnBatch(x, y);
  const began = spent();
  for (let n = 0; n < task.batches; n++) await model.trainOnBatch(x, y);
  console.log((spent() - began) / task.batches);
}

main();
