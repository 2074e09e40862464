"""Data readers of other libraries: write a data set in their format, and read it in shuffled batches.

    python readers.py NAME write SOURCE FOLDER
    python readers.py NAME read FOLDER BATCH PASSES

Each reader can run in its own environment, without DDLF. ``SOURCE`` is an ``.npz`` with ``x`` and ``y``. Its samples
are uint8 arrays, or encoded images: then ``x`` is one array of bytes, and ``ends`` has the end of each image. For each
pass, ``read`` prints a line of JSON with the seconds, the processor seconds of all threads, and the number of samples.
"""

import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FILE_BYTES = 64_000_000
BUFFER = 10_000
"""Size of the shuffle buffer, for readers with such a buffer."""


def samples(source: str) -> Iterator[tuple[Any, int]]:
    """Pictures, as arrays or encoded, with their labels."""
    arrays = dict(np.load(source))
    if "ends" in arrays:
        data, begin = arrays["x"].tobytes(), 0
        for end, label in zip(arrays["ends"].tolist(), arrays["y"].tolist(), strict=True):
            yield data[begin:end], label
            begin = end
    else:
        yield from zip(arrays["x"], arrays["y"].tolist(), strict=True)


class TFRecords:
    """``tf.data``. It is fastest if records are batched before they are parsed."""

    def write(self, source: str, folder: Path) -> None:
        import tensorflow as tf

        count, number, writer = 0, 0, None
        for x, y in samples(source):
            data = x if isinstance(x, bytes) else x.tobytes()
            (folder / "shape.json").write_text(json.dumps([] if isinstance(x, bytes) else x.shape))
            if writer is None or count > FILE_BYTES:
                if writer is not None:
                    writer.close()
                writer, count, number = tf.io.TFRecordWriter(str(folder / f"{number:05}.tfrecord")), 0, number + 1
            features = {
                "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[data])),
                "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[y])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
            count += len(data)
        writer.close()

    def open(self, folder: Path, batch: int) -> Any:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        shape = json.loads((folder / "shape.json").read_text())
        features = {"x": tf.io.FixedLenFeature([], tf.string), "y": tf.io.FixedLenFeature([], tf.int64)}

        def parse(records: Any) -> Any:
            columns = tf.io.parse_example(records, features)
            if shape:
                x = tf.reshape(tf.io.decode_raw(columns["x"], tf.uint8, fixed_length=int(np.prod(shape))), [-1, *shape])
            else:
                x = tf.map_fn(
                    lambda image: tf.io.decode_jpeg(image, channels=3), columns["x"], fn_output_signature=tf.uint8
                )
            return x, columns["y"]

        options = tf.data.Options()
        options.autotune.enabled = False
        options.threading.private_threadpool_size = 1
        files = tf.data.Dataset.list_files(str(folder / "*.tfrecord"), shuffle=True)
        records = tf.data.TFRecordDataset(files, buffer_size=2**23).shuffle(BUFFER)
        return lambda: records.batch(batch).map(parse).prefetch(1).with_options(options)


class WebDataset:
    """``webdataset``: tar files, a buffer to mix samples in."""

    def write(self, source: str, folder: Path) -> None:
        import webdataset

        with webdataset.ShardWriter(str(folder / "%05d.tar"), maxsize=FILE_BYTES, verbose=0) as writer:
            for number, (x, y) in enumerate(samples(source)):
                kind = "jpg" if isinstance(x, bytes) else "npy"
                writer.write({"__key__": f"{number:09}", kind: x, "cls": y})

    def open(self, folder: Path, batch: int) -> Any:
        import webdataset

        files = sorted(map(str, folder.glob("*.tar")))
        data = webdataset.WebDataset(files, shardshuffle=len(files), seed=0, empty_check=False).shuffle(BUFFER)
        return lambda: data.decode("rgb8").to_tuple("npy;jpg", "cls").batched(batch)


class Mosaic:
    """``streaming`` of Mosaic, with torch's loader in the same process."""

    def write(self, source: str, folder: Path) -> None:
        from streaming import MDSWriter

        kind = "jpeg_array"
        first = next(samples(source))[0]
        if not isinstance(first, bytes):
            kind = "ndarray:uint8:" + ",".join(map(str, first.shape))
        columns = {"x": "bytes" if isinstance(first, bytes) else kind, "y": "int"}
        with MDSWriter(out=str(folder), columns=columns) as writer:
            for x, y in samples(source):
                writer.write({"x": x, "y": y})

    def open(self, folder: Path, batch: int) -> Any:
        import torch
        from PIL import Image
        from streaming import StreamingDataset

        torch.set_num_threads(1)

        class Data(StreamingDataset):  # type: ignore[misc]
            def __getitem__(self, at: int) -> Any:
                row = super().__getitem__(at)
                if isinstance(row["x"], bytes):
                    row["x"] = np.asarray(Image.open(io.BytesIO(row["x"])))
                return row["x"], row["y"]

        data = Data(local=str(folder), shuffle=True, batch_size=batch)
        return lambda: torch.utils.data.DataLoader(data, batch_size=batch)


READERS: dict[str, Any] = {"tf.data, TFRecord": TFRecords, "WebDataset": WebDataset, "Mosaic streaming": Mosaic}


def main(name: str, verb: str, *more: str) -> None:
    """Run the command."""
    reader = READERS[name]()
    if verb == "write":
        Path(more[1]).mkdir(parents=True)
        reader.write(more[0], Path(more[1]))
        return
    begun = reader.open(Path(more[0]), int(more[1]))
    for _ in range(int(more[2])):
        begin, used, count = time.perf_counter(), time.process_time(), 0
        for x, _ in begun():
            count += len(x)
        print(json.dumps([time.perf_counter() - begin, time.process_time() - used, count]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
