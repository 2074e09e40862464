// What the engine needs of jax-js (ddlf/peers/browser/engine/arrays.js).
export { blockUntilReady, defaultDevice, init, jit, lax, nn, numpy, random, tree, valueAndGrad } from "@jax-js/jax";
