// Declares the targets, one for each parser.
#ifndef TESTS_FUZZ_TARGETS_H_
#define TESTS_FUZZ_TARGETS_H_

#include "tests/fuzz/fuzz.h"

namespace tessera {

FuzzTarget EndpointTarget();   // meeting_fuzz.cc
FuzzTarget HandshakeTarget();  // meeting_fuzz.cc
FuzzTarget LivenessTarget();   // meeting_fuzz.cc
FuzzTarget StoreTarget();      // meeting_fuzz.cc

FuzzTarget ShardAnswersTarget();   // shard_streams_fuzz.cc
FuzzTarget ShardRequestsTarget();  // shard_streams_fuzz.cc

FuzzTarget TextRecordTarget();   // texts_fuzz.cc
FuzzTarget PackedTextsTarget();  // texts_fuzz.cc
FuzzTarget DescriptorsTarget();  // descriptors_fuzz.cc

FuzzTarget CheckpointDataTarget();      // checkpoint_fuzz.cc
FuzzTarget CheckpointManifestTarget();  // checkpoint_fuzz.cc
FuzzTarget CheckpointIndexTarget();     // checkpoint_fuzz.cc

}  // namespace tessera
#endif  // TESTS_FUZZ_TARGETS_H_
