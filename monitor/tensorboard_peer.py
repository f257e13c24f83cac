"""The other side of tensorboard_test.cc: TensorBoard's own reader.

usage: tensorboard_peer.py FOLDER

Prints what the run in FOLDER has, a line each: "scalar TAG STEP VALUE",
"histogram TAG STEP MIN MAX NUM SUM LIMIT:COUNT ...", "text TAG STEP TEXT". Exits
with 77 where tensorboard is missing.
"""

import sys


def main(folder):
    try:
        from tensorboard.backend.event_processing import event_accumulator
    except ImportError as error:
        print("missing: %s" % error)
        return 77
    run = event_accumulator.EventAccumulator(
        folder, size_guidance={event_accumulator.TENSORS: 0})
    run.Reload()
    for tag in sorted(run.Tags()["scalars"]):
        for event in run.Scalars(tag):
            print("scalar", tag, event.step, repr(event.value))
    for tag in sorted(run.Tags()["histograms"]):
        for event in run.Histograms(tag):
            h = event.histogram_value
            print("histogram", tag, event.step, h.min, h.max, h.num, h.sum,
                  *("%g:%g" % pair for pair in zip(h.bucket_limit, h.bucket)))
    for tag in sorted(run.Tags()["tensors"]):
        plugin = run.SummaryMetadata(tag).plugin_data.plugin_name
        for event in run.Tensors(tag):
            print(plugin, tag, event.step,
                  event.tensor_proto.string_val[0].decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
