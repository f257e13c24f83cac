// Trains two modules against each other, each with an engine of its own: a
// generator learns to make points that a critic cannot tell from those of eight
// clusters on a circle.
//
//   bazel run //examples/gan -- --world=2
//
// Sources: Goodfellow et al., 2014, with the non-saturating loss; a rate for
// each of the two: Heusel et al., 2017.
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/str_format.h"
#include "tessera/tessera.h"
#include "torch/torch.h"

ABSL_FLAG(std::string, generator, "examples/gan/generator.json",
          "Configuration of the generator.");
ABSL_FLAG(std::string, critic, "examples/gan/critic.json",
          "Configuration of the critic.");
ABSL_FLAG(int64_t, steps, 1000,
          "Steps of each of the two, including those before --resume.");
ABSL_FLAG(std::string, save, "", "Folder for checkpoints of both at the end.");
ABSL_FLAG(std::string, resume, "", "Folder that --save wrote.");

namespace nn = torch::nn;

namespace {

constexpr int64_t kClusters = 8, kNoise = 2;

nn::Sequential Mlp(int64_t in, int64_t out) {
  return nn::Sequential(nn::Linear(in, 64), nn::ReLU(), nn::Linear(64, 64),
                        nn::ReLU(), nn::Linear(64, out));
}

at::Tensor Centers() {
  const at::Tensor angle = at::arange(kClusters) * (2 * M_PI / kClusters);
  return at::stack({angle.cos(), angle.sin()}, 1);  // [clusters, 2]
}

at::Tensor RealPoints(int64_t n) {
  return Centers().index({at::randint(kClusters, {n})}) +
         0.05 * at::randn({n, 2});
}

// Returns the critic's loss if `points` should count as real, or as made.
at::Tensor Loss(nn::Sequential& critic, const at::Tensor& points, bool real) {
  const at::Tensor logits = critic->forward(points).to(at::kFloat);
  return at::binary_cross_entropy_with_logits(
      logits, at::full_like(logits, real ? 1. : 0.));
}

class Gan {
 public:
  static absl::StatusOr<std::unique_ptr<Gan>> Create(
      const tessera::StartedJob& job) {
    auto gan = std::make_unique<Gan>();
    TESSERA_ASSIGN_OR_RETURN(const auto generator,
                             job.Load(absl::GetFlag(FLAGS_generator)));
    TESSERA_ASSIGN_OR_RETURN(const auto critic,
                             job.Load(absl::GetFlag(FLAGS_critic)));
    TESSERA_ASSIGN_OR_RETURN(
        gan->generator_engine_,
        tessera::Engine::Create(gan->generator_, generator));
    TESSERA_ASSIGN_OR_RETURN(gan->critic_engine_,
                             tessera::Engine::Create(gan->critic_, critic));
    gan->batch_ =
        gan->critic_engine_->config().train_micro_batch_size_per_gpu();
    return gan;
  }

  absl::Status Step() {
    // This is the critic's turn. The points are detached: nothing of this loss
    // reaches the generator.
    const at::Tensor made = Make(batch_).detach();
    at::Tensor loss =
        Loss(critic_, RealPoints(batch_), true) + Loss(critic_, made, false);
    critic_loss_ = loss.detach();
    TESSERA_RETURN_IF_ERROR(critic_engine_->Backward(loss));
    TESSERA_RETURN_IF_ERROR(critic_engine_->Step());
    // This is the generator's turn. Its loss goes through the critic, whose
    // parameters get gradients on the way. The generator's engine leaves these
    // in .grad(); the critic's engine refuses gradients that it was not told to
    // add (BackwardOptions::add_outside). So they are dropped.
    loss = Loss(critic_, Make(batch_), true);
    generator_loss_ = loss.detach();
    TESSERA_RETURN_IF_ERROR(generator_engine_->Backward(loss));
    TESSERA_RETURN_IF_ERROR(generator_engine_->Step());
    critic_->zero_grad();
    return absl::OkStatus();
  }

  // Computes over the points of all ranks how many clusters have a fair share
  // (half of 1/8 or more of all), and the fraction that is near a cluster.
  // COLLECTIVE.
  absl::Status Judge(tessera::Communicator& ranks, int64_t* clusters,
                     double* near) {
    const c10::NoGradGuard no_gradients;
    const auto [distance, cluster] =
        at::cdist(Make(1000).to(at::kFloat), Centers()).min(1);
    at::Tensor counts =
        at::bincount(cluster.masked_select(distance < 0.25), {}, kClusters);
    TESSERA_RETURN_IF_ERROR(
        ranks.AllReduceSum(counts, {"points by cluster"}).Wait());
    const int64_t all = 1000 * ranks.world_size();
    *clusters = (counts * 2 * kClusters >= all).sum().item<int64_t>();
    *near = counts.sum().item<double>() / static_cast<double>(all);
    return absl::OkStatus();
  }

  // Saves each module in a folder of its own. Both have the generators of
  // random numbers.
  absl::Status Save(const std::string& dir) {
    TESSERA_RETURN_IF_ERROR(
        generator_engine_->SaveCheckpoint(dir + "/generator"));
    return critic_engine_->SaveCheckpoint(dir + "/critic");
  }
  absl::Status Load(const std::string& dir) {
    TESSERA_RETURN_IF_ERROR(
        generator_engine_->LoadCheckpoint(dir + "/generator").status());
    return critic_engine_->LoadCheckpoint(dir + "/critic").status();
  }
  absl::Status Close() {
    TESSERA_RETURN_IF_ERROR(generator_engine_->Close());
    return critic_engine_->Close();
  }

  // Returns the critic's last loss, as the mean over ranks. COLLECTIVE.
  absl::StatusOr<float> MeanCriticLoss(tessera::Communicator& ranks) const {
    at::Tensor sum = critic_loss_.reshape({1}).clone();
    TESSERA_RETURN_IF_ERROR(
        ranks.AllReduceSum(sum, {"the critic's loss"}).Wait());
    return sum.item<float>() / static_cast<float>(ranks.world_size());
  }

  tessera::Engine& engine() { return *generator_engine_; }
  // This rank's; undefined before the first step.
  const at::Tensor& critic_loss() const { return critic_loss_; }
  const at::Tensor& generator_loss() const { return generator_loss_; }

 private:
  at::Tensor Make(int64_t n) {
    return generator_->forward(at::randn({n, kNoise}));
  }

  nn::Sequential generator_ = Mlp(kNoise, 2), critic_ = Mlp(2, 1);
  std::unique_ptr<tessera::Engine> generator_engine_, critic_engine_;
  int64_t batch_ = 0;
  at::Tensor critic_loss_, generator_loss_;
};

absl::Status Train(int64_t steps, Gan& gan, tessera::Communicator& ranks) {
  tessera::Progress progress(&gan.engine(), {.steps = steps});
  while (gan.engine().step() < steps) {
    TESSERA_RETURN_IF_ERROR(gan.Step());
    std::string critic;
    if (progress.IsDue()) {
      TESSERA_ASSIGN_OR_RETURN(const float loss, gan.MeanCriticLoss(ranks));
      critic = absl::StrFormat("critic %.4f", loss);
    }
    TESSERA_RETURN_IF_ERROR(progress.Show(gan.generator_loss(), critic));
  }
  return absl::OkStatus();
}

absl::Status Run(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto job,
      tessera::Start(&argc, argv,
                     {.about = "trains two modules against each other",
                      .reads_config = false}));
  const tessera::World* const world = job.world;
  at::manual_seed(1);  // the same initial values on all ranks
  TESSERA_ASSIGN_OR_RETURN(auto gan, Gan::Create(job));
  at::manual_seed(100 + world->rank());  // points differ between ranks
  if (const std::string dir = absl::GetFlag(FLAGS_resume); !dir.empty()) {
    TESSERA_RETURN_IF_ERROR(gan->Load(dir));
  }
  TESSERA_RETURN_IF_ERROR(Train(absl::GetFlag(FLAGS_steps), *gan, job.comm()));
  if (const std::string dir = absl::GetFlag(FLAGS_save); !dir.empty()) {
    TESSERA_RETURN_IF_ERROR(gan->Save(dir));
  }
  int64_t clusters = 0;
  double near = 0;
  TESSERA_RETURN_IF_ERROR(gan->Judge(*world->communicator(), &clusters, &near));
  if (world->rank() == 0) {
    std::printf("%lld of 8 clusters, %.1f %% of the points near one\n",
                static_cast<long long>(clusters), 100 * near);
    if (gan->critic_loss().defined()) {
      std::printf("last losses here %.9g %.9g\n",
                  gan->critic_loss().item<float>(),
                  gan->generator_loss().item<float>());
    }
  }
  return gan->Close();
}

}  // namespace

TESSERA_MAIN(Run)
