// All layers of the engine, by Keras's names. `listed.py` has the same names, and the arguments that each one takes.

import { ATTENTION } from "./attention.js";
import { CONVOLUTION } from "./convolution.js";
import { CORE } from "./core.js";
import { MERGING } from "./merging.js";
import { NOISE } from "./noise.js";
import { NORMALIZATION } from "./normalization.js";
import { POOLING } from "./pooling.js";
import { RECURRENT } from "./recurrent.js";
import { SHAPING } from "./shaping.js";

export const LAYERS = { ...CORE, ...CONVOLUTION, ...POOLING, ...MERGING, ...SHAPING, ...NORMALIZATION, ...NOISE, ...RECURRENT, ...ATTENTION };
