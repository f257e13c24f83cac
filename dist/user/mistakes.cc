// The usual mistakes, each with what the compiler says of it (dist_test.sh
// looks for these texts). Nothing of this compiles.
#include <tessera/tessera.h>

namespace torch::data {
struct DataLoaderOptions {};  // libtorch's is in torch/data.h
}  // namespace torch::data

absl::StatusOr<int> Number();
absl::Status Nothing();
tessera::Fetch MakeFetch();

// says: In place of main, write absl::Status Run(int argc, char** argv)
int main() {
  TESSERA_RETURN_IF_ERROR(Nothing());
  TESSERA_ASSIGN_OR_RETURN(const int number, Number());
  return number;
}

// says: TESSERA_ASSIGN_OR_RETURN_needs_braces_after_if_
absl::Status WithoutBraces(bool condition) {
  if (condition) TESSERA_ASSIGN_OR_RETURN(const int number, Number());
  return absl::OkStatus();
}

// says: an absl::Status goes to TESSERA_RETURN_IF_ERROR
absl::Status StatusWithoutValue() {
  TESSERA_ASSIGN_OR_RETURN(auto nothing, Nothing());
  return absl::OkStatus();
}

// says: TESSERA_RETURN_IF_ERROR takes an absl::Status or an absl::StatusOr
absl::Status NoStatus() {
  TESSERA_RETURN_IF_ERROR(7);
  return absl::OkStatus();
}

// says: has no member named 'Step'
void EngineInItsStatusOr(std::shared_ptr<torch::nn::Module> model) {
  auto engine = tessera::Engine::Create(model, "zero3.json");
  engine->Step();
}

// says: DataLoader::Create takes an order and no StatusOr of one
void OrderInItsStatusOr() {
  auto order = tessera::DistributedOrder::Create({});
  auto loader = tessera::DataLoader::Create(order, MakeFetch(), {});
}

// says: DataLoader::Create takes tessera::DataLoaderOptions, not torch::data::
void OptionsOfLibtorch(std::unique_ptr<tessera::SampleOrder> order) {
  auto loader = tessera::DataLoader::Create(std::move(order), MakeFetch(),
                                            torch::data::DataLoaderOptions());
}
