// How fast samples come out of a token file: its bytes widened to int64 and
// checked against the vocabulary, as ratios to a plain read of the same mapped
// file, the sum of its 64-bit words, and to a memcpy of its bytes. All run on
// one thread over the file's pages, which are in memory by then, in turns of
// some 1 MiB each, so that whatever else the machine does happens to all; each
// is a third of the file ahead of the one before, so that none finds in a cache
// what another has read. Time is the thread's own on the processor: nothing
// here waits. A sample is written to the same buffer again and again, as a
// batch is.
//
//   benchmarks/data --mib=512 --seq_len=1024 --rounds=9
//
// The medians of the rounds, in GB of the file a second, and of their ratios
// with the least and the largest.
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/bits.h"
#include "base/isa.h"
#include "base/status.h"
#include "benchmarks/flag_checks.h"
#include "data/text/token_corpus.h"

ABSL_FLAG(int64_t, mib, 512, "size of the file");
ABSL_FLAG(int64_t, seq_len, 1024, "tokens of a sample, less one");
ABSL_FLAG(int64_t, rounds, 9, "of which medians are printed");
ABSL_FLAG(bool, shuffle, false, "samples in a random order");
ABSL_FLAG(std::string, folder, "/tmp", "where the file is written");

namespace tessera {
namespace {

double Seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) +
         1e-9 * static_cast<double>(time.tv_nsec);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

uint64_t g_sum = 0;  // so that nothing is left out

__attribute__((target("avx2"))) uint64_t SumAvx2(const uint64_t* words,
                                                 size_t count) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}

uint64_t SumPortable(const uint64_t* words, size_t count) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}

// Bytes [begin, begin + bytes) of the file; a rest of less than 8 is left out.
void PlainRead(absl::Span<const uint8_t> bytes, size_t begin, size_t count) {
  begin = begin / 8 * 8;
  const auto* words = reinterpret_cast<const uint64_t*>(bytes.data() + begin);
  g_sum += BestIsa() == Isa::kPortable ? SumPortable(words, count / 8)
                                       : SumAvx2(words, count / 8);
}

absl::Status WriteFile(const std::string& path, int64_t mib) {
  std::ofstream file(path, std::ios::binary);
  std::vector<uint64_t> words(1 << 17);
  uint64_t next = 0;
  for (int64_t i = 0; i < mib; ++i) {
    for (uint64_t& word : words) word = MixBits(++next);
    file.write(reinterpret_cast<const char*>(words.data()), 1 << 20);
  }
  if (file.flush()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
}

// One type of tokens.
absl::Status Measure(const std::string& path, TokenType type) {
  const int64_t seq_len = absl::GetFlag(FLAGS_seq_len);
  TESSERA_ASSIGN_OR_RETURN(
      const TokenCorpus corpus,
      TokenCorpus::OpenFiles({path}, {type, MaxToken(type) + 1}));
  const absl::Span<const uint8_t> bytes = corpus.files()[0].bytes();
  std::vector<int64_t> order(static_cast<size_t>(corpus.num_samples(seq_len)));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  if (absl::GetFlag(FLAGS_shuffle)) {
    for (size_t i = order.size() - 1; i > 0; --i) {
      std::swap(order[i], order[MixBits(i) % (i + 1)]);
    }
  }
  const auto sample_bytes = static_cast<size_t>(seq_len * TokenBytes(type));
  std::vector<int64_t> sample(static_cast<size_t>(seq_len) + 1);
  const double gb = static_cast<double>(order.size() * sample_bytes) / 1e9;
  std::array<std::vector<double>, 3> rates;  // plain read, copy, samples
  std::array<std::vector<double>, 2> ratios;
  const size_t turn = std::max<size_t>(1, (size_t{1} << 20) / sample_bytes);
  // The first round brings the pages; it is not counted.
  for (int64_t round = -1; round < absl::GetFlag(FLAGS_rounds); ++round) {
    std::array<double, 3> seconds = {};
    for (size_t first = 0; first < order.size(); first += turn) {
      const size_t last = std::min(order.size(), first + turn);
      for (size_t way = 0; way < 3; ++way) {
        const double start = Seconds();
        for (size_t i = first; i < last; ++i) {
          const size_t ahead = (i + way * order.size() / 3) % order.size();
          const auto begin = static_cast<size_t>(order[ahead]) * sample_bytes;
          if (way == 0) {
            PlainRead(bytes, begin, sample_bytes);
          } else if (way == 1) {
            std::memcpy(sample.data(), bytes.data() + begin, sample_bytes);
          } else {
            TESSERA_RETURN_IF_ERROR(corpus.CopySample(order[ahead], seq_len,
                                                      absl::MakeSpan(sample)));
          }
          g_sum += static_cast<uint64_t>(sample[0]);
        }
        seconds[way] += Seconds() - start;
      }
    }
    if (round < 0) continue;
    for (size_t way = 0; way < 3; ++way) {
      rates[way].push_back(gb / seconds[way]);
    }
    for (size_t way = 0; way < 2; ++way) {
      ratios[way].push_back(seconds[way] / seconds[2]);
    }
  }
  std::cout << absl::StreamFormat(
      "%-6s  read %5.2f  copy %5.2f  samples %5.2f GB/s", TokenTypeName(type),
      Median(rates[0]), Median(rates[1]), Median(rates[2]));
  for (size_t way = 0; way < 2; ++way) {
    const auto [least, largest] =
        std::minmax_element(ratios[way].begin(), ratios[way].end());
    std::cout << absl::StreamFormat("  to %s %.2f (%.2f to %.2f)",
                                    way == 0 ? "read" : "copy",
                                    Median(ratios[way]), *least, *largest);
  }
  std::cout << "\n";
  return absl::OkStatus();
}

absl::Status Run(const std::vector<char*>& words) {
  TESSERA_RETURN_IF_ERROR(FlagsAlone(words));
  TESSERA_RETURN_IF_ERROR(AtLeast("mib", 1, absl::GetFlag(FLAGS_mib)));
  TESSERA_RETURN_IF_ERROR(AtLeast("seq_len", 1, absl::GetFlag(FLAGS_seq_len)));
  TESSERA_RETURN_IF_ERROR(AtLeast("rounds", 1, absl::GetFlag(FLAGS_rounds)));
  const std::string path =
      absl::StrCat(absl::GetFlag(FLAGS_folder), "/tokens.", getpid());
  const auto remover = absl::MakeCleanup([&] { unlink(path.c_str()); });
  TESSERA_RETURN_IF_ERROR(WriteFile(path, absl::GetFlag(FLAGS_mib)));
  std::cout << absl::GetFlag(FLAGS_mib) << " MiB, seq_len "
            << absl::GetFlag(FLAGS_seq_len) << ", "
            << (absl::GetFlag(FLAGS_shuffle) ? "shuffled" : "in order") << ", "
            << IsaName(BestIsa()) << "\n";
  for (const TokenType type :
       {TokenType::kUint8, TokenType::kUint16, TokenType::kUint32}) {
    TESSERA_RETURN_IF_ERROR(Measure(path, type));
  }
  return g_sum == 0 ? absl::InternalError("nothing was read")
                    : absl::OkStatus();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "the speed of token files; see benchmarks/data.cc");
  const absl::Status status = tessera::Run(absl::ParseCommandLine(argc, argv));
  if (status.ok()) return 0;
  std::cerr << status.message() << "\n";
  return 1;
}
