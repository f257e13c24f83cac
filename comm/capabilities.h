// Capabilities: what a group's backend can do; users of the group check this
// instead of its name.
#ifndef COMM_CAPABILITIES_H_
#define COMM_CAPABILITIES_H_

namespace tessera {

struct Capabilities {
  // Sums are in rank order, so they have the bits that they have on every other
  // backend of which this is true.
  bool sums_in_rank_order = true;
  // Communicator::ShareMemory may give memory.
  bool shared_memory = false;
  // Reads of the others' shards (Communicator::ServeShards) are faster than
  // all-gathers.
  bool prefers_pulls = false;
  // Tensors of a device go directly from device to device; else through host
  // memory.
  bool device = false;
  // Collectives wait for other ranks; false in a group of one.
  bool waits = true;
};

}  // namespace tessera
#endif  // COMM_CAPABILITIES_H_
