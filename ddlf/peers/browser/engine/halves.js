// Types with 2 bytes for the weights of a set, with the bits of ddlf/peers/wire.py: to nearest, ties to even. NaN stays NaN.
// Plain loops, since `from` with a function takes a hundred times as long.

const bitsOf = (values) => new Uint32Array(values.buffer, values.byteOffset, values.length);

const bfloat16 = {
  name: "bfloat16", limit: 255.5 * 2 ** 120, // the smallest magnitude that becomes infinite
  round(values, to) {
    const bits = bitsOf(values);
    for (let n = 0; n < bits.length; n++) {
      const each = bits[n], upper = each >>> 16;
      to[n] = (each & 0x7fffffff) > 0x7f800000 ? upper | 0x40 : (each + 0x7fff + (upper & 1)) >>> 16;
    }
  },
  read(from) {
    const bits = new Uint32Array(from.length);
    for (let n = 0; n < bits.length; n++) bits[n] = from[n] << 16;
    return new Float32Array(bits.buffer);
  },
};

const float16 = {
  name: "float16", limit: 65520,
  round(values, to) {
    const bits = bitsOf(values);
    for (let n = 0; n < bits.length; n++) {
      const each = bits[n], size = each & 0x7fffffff, sign = (each >>> 16) & 0x8000;
      let half;
      if (size > 0x7f800000) half = 0x7e00 | ((size >>> 13) & 0x3ff);
      else if (size >= 0x477ff000) half = 0x7c00; // 65520 and more
      else if (size >= 0x38800000) half = (size - 0x38000000 + 0xfff + ((size >>> 13) & 1)) >>> 13;
      else half = (Math.fround(Math.abs(values[n]) + 0.5) - 0.5) * 2 ** 24; // multiples of 2^-24, as float32 has them above 0.5
      to[n] = sign | half;
    }
  },
  // The bits of a half, shifted, are those of a float32 that is 2^112 times smaller.
  read(from) {
    const bits = new Uint32Array(from.length), values = new Float32Array(bits.buffer);
    for (let n = 0; n < bits.length; n++) {
      const each = from[n], isSpecial = (each & 0x7c00) === 0x7c00;
      bits[n] = ((each & 0x8000) << 16) | ((each & 0x7fff) << 13);
      values[n] *= isSpecial ? (each & 0x3ff ? NaN : Infinity) : 2 ** 112;
    }
    return values;
  },
};

// Return whether a type makes finite values infinite.
export function isBeyond({ limit }, values) {
  for (let n = 0; n < values.length; n++) {
    const size = Math.abs(values[n]);
    if (size >= limit && size < Infinity) return true;
  }
  return false;
}

export const HALVES = { BF16: bfloat16, F16: float16 };
