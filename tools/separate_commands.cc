#include "tools/separate_commands.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace tessera {
namespace {

constexpr char kApart[] = "/../libexec/tessera/bin";  // dist/BUILD

}  // namespace

std::string FindProgram(const std::string& folder, const std::string& name) {
  for (const char* const place : {"", kApart}) {
    const std::string path = absl::StrCat(folder, place, "/", name);
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  return "";
}

std::string NoProgram(const std::string& folder, const std::string& name) {
  return absl::StrCat(folder, "/", name, ": no such program, nor in ", folder,
                      kApart,
                      "; unpack the whole archive, or build it in a "
                      "checkout: bazel build //tools:",
                      name);
}

Command PlanCommand(std::function<int(CommandCall*)> run) {
  return {"plan",
          "",
          "Prints what each rank will hold at every stage, and how long a step "
          "takes.",
          "Nothing is computed, and the model may be of any size. The batch is "
          "train_micro_batch_size_per_gpu of the configuration. For a model of "
          "your own call tessera::Plan. It needs libtorch (LD_LIBRARY_PATH).",
          {{"--config", "FILE", "The configuration."},
           {"--model", "MODEL",
            "gpt:KEY=NUMBER,... with dim, layers, heads, seq, vocab; "
            "llama:KEY=NUMBER,... with kv_heads and hidden, too; or the "
            "config.json of a Llama of Hugging Face, as config.json:seq=4096."},
           {"--world", "N", "The number of ranks (1)."},
           {"--memory", "GIB",
            "Memory of a rank; default: sharding.memory_limit_bytes, or this "
            "host's memory."},
           {"--one_host", "",
            "All ranks are on one host and share a working copy."},
           {"--network", "GB/S",
            "Network rate of a rank. Without it, times exclude communication."},
           {"--latency", "US", "Latency of a message in microseconds (10)."},
           {"--tflops", "N", "Compute rate of a rank; default: measured here."},
           {"--bandwidth", "GB/S",
            "Memory bandwidth of a rank; default: measured here."},
           {"--disk", "GB/S",
            "Disk rate of a rank; default: measured in nvme_path."},
           {"--json", "", "Prints JSON: {auto, plan}."}},
          {"plan --config zero3.json --model gpt:dim=4096,layers=32,heads=32 "
           "--world 8",
           "plan --config zero3.json --model Llama-3.2-1B/config.json:seq=4096 "
           "--json"},
          std::move(run)};
}

Command TokenizeCommand(std::function<int(CommandCall*)> run) {
  return {
      "tokenize",
      "[TEXT...]",
      "Writes the tokens of text files, or prints tokens as text.",
      "Each file is a document; names may be patterns. Give either --out and "
      "texts, or --decode.",
      {{"--out", "FILE", "Token file to write."},
       {"--tokenizer", "T",
        "bytes+end (257 tokens, the default), bytes (256), or the .model file "
        "of SentencePiece."},
       {"--lines", "", "Each line that is not empty is a document."},
       {"--begin", "",
        "Puts the end-of-text token before each document, as in llm.c's files, "
        "instead of after it."},
       {"--no_end", "", "Writes no end-of-text token."},
       {"--type", "uint8|uint16|uint32",
        "Type of a token; default: as narrow as the vocabulary allows."},
       {"--headerless", "", "Writes no header, as in nanoGPT's files."},
       {"--decode", "FILE", "Prints the first tokens of such a file as text."},
       {"--tokens", "N", "The number of tokens to print (100)."},
       {"--quiet", "", "Prints nothing on success."}},
      {"tokenize --out train.bin --tokenizer sp.model 'text/*.txt'",
       "tokenize --decode train.bin --tokenizer sp.model --tokens 20"},
      std::move(run)};
}

}  // namespace tessera
