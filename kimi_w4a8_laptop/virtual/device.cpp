// A "cuda" device for a torch that was built for CPUs: tensors say cuda:N, and a CPU kernel computes each operator.
//
// The dispatch key CUDA gets one boxed fallback. It passes CPU tensors over the same memory to the CPU's kernel and
// returns CUDA tensors. It refuses what a GPU refuses (tensors of two devices in one operator, a host synchronization
// during graph capture), counts what costs time on a GPU, and refuses an access to data that was not waited for.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <csignal>
#include <map>
#include <mutex>
#include <set>
#include <sys/mman.h>

using c10::DeviceType;
using c10::IValue;
using torch::jit::Stack;

namespace {

constexpr auto kCUDA = DeviceType::CUDA;
constexpr int kDevices = 8, kStreams = 64;
std::recursive_mutex lock;  // of everything below that is not thread-local

// ---- counters -------------------------------------------------------------------------------------------------
enum Kind { kLaunch, kAllocation, kSynchronization, kPageableCopy, kHostCopy, kKinds };
const char* const kNames[] = {"launch", "allocation", "synchronization", "pageable copy", "host copy"};
std::map<std::string, uint64_t> counts[kKinds];
bool capturing = false;
thread_local bool replaying = false;  // a graph is one launch

void count(Kind kind, const std::string& name) {
  if (replaying) return;
  TORCH_CHECK(!capturing || kind == kLaunch || kind == kAllocation || kind == kHostCopy, "operation not permitted when ",
              "stream is capturing: ", kNames[kind], " in ", name);
  std::lock_guard<std::recursive_mutex> guard(lock);
  ++counts[kind][name];
}

// ---- streams: a vector clock for each, and one for the host ---------------------------------------------------
using Clock = std::array<uint64_t, kStreams>;
Clock clocks[kStreams], host;
std::map<int64_t, Clock> events;
std::string race;  // the first that was noticed and not yet raised
int64_t next_event = 1, next_stream = kDevices;  // streams 0 to 7 are the devices' default streams
thread_local int current_device = 0;
thread_local int current_stream[kDevices] = {0, 1, 2, 3, 4, 5, 6, 7};

void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) into[i] = std::max(into[i], other[i]);
}

int64_t recorded = 0, made = 0;  // the graph that is being captured, or 0; and the number of blocks so far

struct Access {
  int stream = -1;
  uint64_t time = 0;
  const char *low = nullptr, *high = nullptr;
  std::string name;
};

// Memory of a CUDA storage or of a pinned one, and its last accesses. cpu: the storage that holds the CUDA storage's.
struct Block {
  c10::Storage cpu;
  const char *low = nullptr, *high = nullptr;
  std::map<int, Access> writes, reads;  // by stream
  bool pinned = false;
  bool unordered = false;  // vg_unordered
  int64_t graph = recorded, number = ++made;  // graph: whose capture allocated it, or 0

  Block(c10::Storage storage) : cpu(std::move(storage)) { hold(static_cast<const char*>(cpu.data()), cpu.nbytes()); }
  Block(const char* data, size_t bytes) : pinned(true) { hold(data, bytes); }
  ~Block() {
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto found = blocks().find(low);
    if (found != blocks().end() && found->second == this) blocks().erase(found);
  }
  Block(const Block&) = delete;

  static std::map<const char*, Block*>& blocks() {  // by address
    static auto* known = new std::map<const char*, Block*>;
    return *known;
  }
  static Block* at(const void* data) {
    auto* address = static_cast<const char*>(data);
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto after = blocks().upper_bound(address);
    if (after == blocks().begin()) return nullptr;
    auto* block = (--after)->second;
    return address < block->high ? block : nullptr;
  }

 private:
  void hold(const char* data, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    low = data, high = data + std::max<size_t>(bytes, 1);
    if (data) blocks()[low] = this;
  }
};

std::map<int64_t, std::vector<std::unique_ptr<Block>>> pools;  // of the graphs: what their captures allocated and freed

void release(void* data) {
  std::unique_ptr<Block> block(static_cast<Block*>(data));
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (auto pool = pools.find(block->graph); pool != pools.end()) pool->second.push_back(std::move(block));
}
void borrow(void*) {}  // the deleter of a graph's arguments, which do not keep their memory

c10::DataPtr data_ptr(Block* block, int device, c10::DeleterFnPtr deleter = &release) {
  return {block->cpu.mutable_data(), block, deleter, c10::Device(kCUDA, device)};
}

Block* block_of(const c10::Storage& storage) {
  const auto deleter = storage.data_ptr().get_deleter();
  TORCH_CHECK(deleter == &release || deleter == &borrow, "memory that the virtual device did not allocate");
  return static_cast<Block*>(storage.data_ptr().get_context());
}

c10::Storage cuda_storage(Block* block, int device, c10::DeleterFnPtr deleter = &release) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), block->cpu.nbytes(),
                                                            data_ptr(block, device, deleter), c10::GetAllocator(kCUDA), true));
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    count(kAllocation, "storage");
    auto cpu = c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                                  c10::GetCPUAllocator(), true));
    return data_ptr(new Block{cpu}, current_device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
Allocator allocator;
const bool allocator_is_set = (c10::SetAllocator(kCUDA, &allocator, 1), true);

// ---- tensors --------------------------------------------------------------------------------------------------
void copy_geometry(const at::Tensor& from, at::TensorImpl* to) {
  to->set_storage_offset(from.storage_offset());
  to->set_sizes_and_strides(from.sizes(), from.strides());
}

// base: the tensor that the result is a view of; inference mode makes a view of an ordinary tensor an ordinary one
at::Tensor with_storage(const c10::Storage& storage, const at::Tensor& like, DeviceType type, const at::Tensor* base = nullptr) {
  auto key = c10::DispatchKeySet(type == kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  auto tensor = base ? at::detail::make_tensor<at::TensorImpl>(at::TensorImpl::VIEW, c10::Storage(storage), base->key_set(), like.dtype())
                     : at::detail::make_tensor<at::TensorImpl>(c10::Storage(storage), key, like.dtype());
  copy_geometry(like, tensor.unsafeGetTensorImpl());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

at::Tensor host_alias(const at::Tensor& tensor) {
  return with_storage(block_of(tensor.storage())->cpu, tensor, DeviceType::CPU);
}

std::pair<const char*, const char*> extent(const at::Tensor& t) {
  auto* low = static_cast<const char*>(t.storage().data()) + t.storage_offset() * t.itemsize();
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {low, t.numel() ? low + (last + 1) * t.itemsize() : low};
}

// Raise the first race, if there is one. The host's own access is noticed in a signal, so the next launch raises it.
void raise_race() {
  if (race.empty()) return;
  auto found = std::exchange(race, "");
  TORCH_CHECK(false, "race: ", found, ": nothing waits for it");
}

// Record an access of a stream; refuse it where the stream has not waited for an access that it must follow.
void access(Block* block, int stream, const char* low, const char* high, bool write, bool scattered, const std::string& name) {
  if (!block || low >= high) return;
  auto& clock = clocks[stream];
  auto check = [&](const std::map<int, Access>& others, const char* kind) {
    for (auto& [other, last] : others)
      if (other != stream && clock[other] < last.time && low < last.high && last.low < high)
        race = name + " " + kind + " " + last.name;
  };
  check(block->writes, write ? "overwrites" : "reads");
  if (write && !scattered && !block->unordered) check(block->reads, "overwrites what is read by");
  raise_race();
  Access mine{stream, clock[stream], low, high, name};
  auto& last = (write ? block->writes : block->reads)[stream];
  if (last.stream >= 0 && last.time == mine.time) {  // several arguments of one launch
    mine.low = std::min(low, last.low), mine.high = std::max(high, last.high);
  }
  last = mine;
}

void access(const at::Tensor& tensor, bool write, bool scattered, const std::string& name) {
  auto [low, high] = extent(tensor);
  access(block_of(tensor.storage()), current_stream[tensor.get_device()], low, high, write, scattered, name);
}

// ---- pinned memory: the host may not touch what a copy under way reads or writes ------------------------------
// Its pages are protected until the host has waited for the copy. A touch before that is a signal, and noted as a race.
struct Pending {
  const char *low, *high;
  int stream;
  uint64_t time;
  bool write;  // the copy writes the host's memory
};
std::vector<Pending> pending;
thread_local bool device_at_work = false;  // in a kernel, whose accesses have been checked
struct AtWork {
  bool before = std::exchange(device_at_work, true);
  ~AtWork() { device_at_work = before; }
};
constexpr uintptr_t kPage = 4096;
struct sigaction other_handler;

void protect(const char* low, const char* high, int protection) {
  auto first = reinterpret_cast<uintptr_t>(low) / kPage * kPage;
  auto last = (reinterpret_cast<uintptr_t>(high) + kPage - 1) / kPage * kPage;
  mprotect(reinterpret_cast<void*>(first), last - first, protection);
}

void settle() {  // after the host has waited for something
  std::vector<Pending> left;
  for (auto& one : pending)
    if (host[one.stream] < one.time) left.push_back(one);
    else protect(one.low, one.high, PROT_READ | PROT_WRITE);
  pending = left;
  for (auto& one : pending) protect(one.low, one.high, one.write ? PROT_NONE : PROT_READ);
}

void forget(Block* block) {  // the copies under way of a pinned block
  if (!block->pinned) return;
  protect(block->low, block->high, PROT_READ | PROT_WRITE);
  std::erase_if(pending, [&](auto& one) { return block->low <= one.low && one.low < block->high; });
}

void touched(int number, siginfo_t* info, void* context) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto* address = static_cast<const char*>(info->si_addr);
  auto* block = Block::at(address);
  if (!block || !block->pinned) {  // a real fault: as without this handler
    sigaction(SIGSEGV, &other_handler, nullptr);
    return;
  }
  for (auto& one : pending)
    if (!device_at_work && one.low <= address && address < one.high && race.empty())
      race = one.write ? "the host reads pinned memory before the copy that writes it has ended"
                       : "the host overwrites pinned memory before the copy that reads it has ended";
  protect(block->low, block->high, PROT_READ | PROT_WRITE);
}

void copy_under_way(const char* low, const char* high, int stream, bool write) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (auto* block = Block::at(low); !block || block->unordered) return;
  struct sigaction ours{}, found{};
  ours.sa_sigaction = &touched, ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &ours, &found);  // again: Python's faulthandler may have come in between
  if (found.sa_sigaction != &touched) other_handler = found;
  pending.push_back({low, high, stream, clocks[stream][stream], write});
  settle();
}

void host_waits(const Clock& clock) {
  join(host, clock);
  settle();
}

void begin_launch(int device) {
  raise_race();
  auto stream = current_stream[device];
  join(clocks[stream], host);
  ++clocks[stream][stream];
}

// Return a value with `change` made to its tensor, or to each of a list.
template <typename Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

// ---- graphs: the operators of a capture, run again on the same memory -------------------------------------------
using Callback = bool (*)(int64_t);  // false: the kernel raised
Callback callback = nullptr;
struct Launch {
  const c10::OperatorHandle* op;
  Stack arguments, results;
  int64_t callback_id;
  std::map<const char*, int64_t> touched;  // addresses and numbers of the blocks of the tensors
};
std::map<int64_t, std::vector<Launch>> graphs;
std::vector<Launch>* recording = nullptr;

// Replace the tensors of a recorded call by ones that do not keep their memory, as a graph has addresses alone.
IValue borrowed(const IValue& value, Launch& launch) {
  return changed(value, [&](const at::Tensor& tensor) {
    if (!tensor.is_cuda()) return tensor;
    auto* block = block_of(tensor.storage());
    if (block->cpu.data()) launch.touched[block->low] = block->number;
    return with_storage(cuda_storage(block, tensor.get_device(), &borrow), tensor, kCUDA);
  });
}

void record(const c10::OperatorHandle* op, const Stack& arguments, const Stack& results) {
  Launch launch{op, {}, {}, 0, {}};
  for (const auto& value : arguments) launch.arguments.push_back(borrowed(value, launch));
  for (const auto& value : results) launch.results.push_back(borrowed(value, launch));
  recording->push_back(std::move(launch));
}

// ---- the fallback ---------------------------------------------------------------------------------------------
const std::set<std::string> kViews = {"aten::view", "aten::as_strided", "aten::_reshape_alias", "aten::alias", "aten::detach",
                                      "aten::unfold", "aten::view_as_real", "aten::view_as_complex", "aten::set_",
                                      "aten::resize_", "aten::empty", "aten::empty_strided", "aten::is_set_to", "virtual_gpu::host"};
const std::set<std::string> kSynchronous = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
                                            "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::is_nonzero"};
const std::set<std::string> kTakesHostIndex = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};
const std::set<std::string> kScattered = {"aten::index_put_", "aten::_index_put_impl_", "aten::scatter_", "aten::index_copy_"};

struct Swap {
  at::Tensor cuda, cpu;
  bool written;
};

struct Call {
  const c10::OperatorHandle& op;
  std::string name;
  std::vector<Swap> swaps;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;  // cuda, cpu
  int device = -1;
  bool host_operand = false;
  at::Tensor under_way;  // pinned memory of a copy for which nothing waits

  explicit Call(const c10::OperatorHandle& handle) : op(handle), name(handle.schema().name()) {}

  at::Tensor to_cpu(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      host_operand |= tensor.dim() > 0 || written;
      return tensor;
    }
    TORCH_CHECK(device < 0 || device == tensor.get_device() || name == "aten::copy_", name, ": Expected all tensors to be on ",
                "the same device, but found at least two devices, cuda:", device, " and ", tensor.device());
    if (device < 0) device = tensor.get_device();
    swaps.push_back({tensor, host_alias(tensor), written});
    return swaps.back().cpu;
  }

  IValue value_to_cpu(const IValue& value, bool written) {
    if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
      c10::List<c10::List<at::Tensor>> lists;
      for (const auto& inner : value.toListRef()) lists.push_back(value_to_cpu(inner, written).toTensorList());
      return lists;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice().has_index() ? value.toDevice().index() : current_device;
      return c10::Device(DeviceType::CPU);
    }
    if (value.isStorage() && value.toStorage().device().is_cuda()) {
      storages.emplace_back(value.toStorage(), block_of(value.toStorage())->cpu);
      return storages.back().second;
    }
    return changed(value, [&](const at::Tensor& tensor) { return to_cpu(tensor, written); });
  }

  c10::Storage storage_of(const c10::Storage& cpu) {
    for (auto& swap : swaps)
      if (block_of(swap.cuda.storage())->cpu.is_alias_of(cpu)) return swap.cuda.storage();
    for (auto& [cuda, known] : storages)
      if (known.is_alias_of(cpu)) return cuda;
    count(kAllocation, name);
    return cuda_storage(new Block{cpu}, device);
  }

  at::Tensor to_cuda(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    for (auto& swap : swaps)
      if (swap.cpu.is_same(tensor)) return swap.cuda;
    for (auto& swap : swaps)
      if (block_of(swap.cuda.storage())->cpu.is_alias_of(tensor.storage()))
        return with_storage(swap.cuda.storage(), tensor, kCUDA, &swap.cuda);
    return with_storage(storage_of(tensor.storage()), tensor, kCUDA);
  }

  IValue value_to_cuda(const IValue& value) {
    return changed(value, [&](const at::Tensor& tensor) { return to_cuda(tensor); });
  }

  // Carry a resize or a new storage of an argument over to the CUDA tensor.
  void carry_over(const Swap& swap) {
    auto* impl = swap.cuda.unsafeGetTensorImpl();
    auto* block = block_of(swap.cuda.storage());
    if (!block->cpu.is_alias_of(swap.cpu.storage())) {
      impl->set_storage_keep_dtype(storage_of(swap.cpu.storage()));
    } else if (swap.cuda.storage().data() != block->cpu.data() || swap.cuda.storage().nbytes() != block->cpu.nbytes()) {
      auto* storage = swap.cuda.storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(data_ptr(new Block{block->cpu}, swap.cuda.get_device()));
      storage->set_nbytes(block_of(swap.cuda.storage())->cpu.nbytes());
    }
    if (swap.cuda.sizes() != swap.cpu.sizes() || swap.cuda.strides() != swap.cpu.strides() ||
        swap.cuda.storage_offset() != swap.cpu.storage_offset())
      copy_geometry(swap.cpu, impl);
  }
};

bool pinned(const void* data);

// Copies between host and device: pageable host memory makes either direction wait for the device.
void count_copy(Call& call, const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const at::Tensor& on_host = to.is_cuda() ? from : to;
  if (on_host.is_cuda() || !on_host.numel()) return;
  bool down = !to.is_cuda();
  auto name = std::string(down ? "to host" : "to device");
  if (!pinned(on_host.storage().data())) {
    if (down) count(kSynchronization, name);
    else count(kPageableCopy, name);
    if (down) host_waits(clocks[current_stream[from.get_device()]]);
  } else if (non_blocking) {
    count(kHostCopy, name);
    auto [low, high] = extent(on_host);
    access(Block::at(low), current_stream[call.device], low, high, down, false, "aten::copy_");
    call.under_way = on_host;
  } else {
    count(kSynchronization, name);
    host_waits(clocks[current_stream[call.device]]);
  }
}

// A GPU divides by a Python number by multiplying with its reciprocal, which may lose the last bit of the quotient
// (PyTorch's native/cuda/BinaryDivTrueKernel.cu, hipified for ROCm).
c10::OperatorHandle as_on_gpu(const c10::OperatorHandle& op, const std::string& name, Stack* stack, size_t first) {
  const auto& overload = op.schema().overload_name();
  if ((name != "aten::div" && name != "aten::div_") || (overload != "Tensor" && overload != "out")) return op;
  const at::Tensor self = (*stack)[first].toTensor(), number = (*stack)[first + 1].toTensor();
  if (!number.unsafeGetTensorImpl()->is_wrapped_number()) return op;
  const auto type = at::result_type(self, number);
  if (at::isComplexType(type)) return op;
  const double value = number.item<double>();
  at::Tensor inverse = at::scalar_tensor(type == at::kDouble ? 1.0 / value : 1.0f / static_cast<float>(value), at::kDouble);
  inverse.unsafeGetTensorImpl()->set_wrapped_number(true);
  (*stack)[first + 1] = inverse;
  return c10::Dispatcher::singleton().findSchemaOrThrow(name == "aten::div" ? "aten::mul" : "aten::mul_", overload.c_str());
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op);
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  Stack original;
  if (recording && !kViews.count(call.name)) original.assign(stack->begin() + first, stack->end());
  at::Tensor to, from;
  bool non_blocking = false;
  if (call.name == "aten::copy_") {
    to = (*stack)[first].toTensor(), from = (*stack)[first + 1].toTensor(), non_blocking = (*stack)[first + 2].toBool();
  }
  bool masked = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    const auto* alias = arguments[i].alias_info();
    if (kTakesHostIndex.count(call.name) && value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& index : value.toOptionalTensorVector()) {
        if (!index || !index->defined()) continue;
        masked |= index->scalar_type() == at::kBool || index->scalar_type() == at::kByte;
        if (!index->is_cuda() && index->numel()) count(kPageableCopy, call.name + " with indices of the host");
      }
      bool before = call.host_operand;
      value = call.value_to_cpu(value, false);
      call.host_operand = before;
    } else {
      value = call.value_to_cpu(value, alias && alias->isWrite());
    }
    if (value.isBool() && arguments[i].name() == "pin_memory") value = false;
  }
  TORCH_CHECK(!call.host_operand || to.defined() || call.name.rfind("c10d", 0) == 0, call.name, ": Expected all tensors to be on ",
              "the same device, but found at least two devices, cuda:", call.device, " and cpu");
  if (call.device < 0) call.device = current_device;
  {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (!kViews.count(call.name)) {
      begin_launch(call.device);
      if (!recording)  // a GPU computes at a replay alone
        for (auto& swap : call.swaps) access(swap.cuda, swap.written, kScattered.count(call.name), call.name);
      if (to.defined()) count_copy(call, to, from, non_blocking);
      count(kLaunch, call.name);
    }
    if (kSynchronous.count(call.name) || masked) {
      count(kSynchronization, call.name);
      host_waits(clocks[current_stream[call.device]]);
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    AtWork at_work;
    as_on_gpu(op, call.name, stack, first).redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  if (call.under_way.defined()) {
    auto [low, high] = extent(call.under_way);
    copy_under_way(low, high, current_stream[call.device], !to.is_cuda());
  }
  for (auto& swap : call.swaps) call.carry_over(swap);
  const size_t results = schema.returns().size();
  if (!to.defined() || to.is_cuda())  // a copy to the host returns the host's tensor
    for (size_t i = stack->size() - results; i < stack->size(); ++i) (*stack)[i] = call.value_to_cuda((*stack)[i]);
  if (recording && !original.empty())
    record(&op, original, Stack(stack->end() - static_cast<int64_t>(results), stack->end()));
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { run(op, stack); }

void replay(int64_t graph) {
  count(kLaunch, "graph");
  struct Replaying {
    Replaying() { replaying = true; }
    ~Replaying() { replaying = false; }
  } scope;
  at::AutoDispatchBelowADInplaceOrView guard;
  for (auto& launch : graphs[graph]) {
    if (!launch.op) {
      TORCH_CHECK(callback(launch.callback_id), "a kernel failed in the replay of a graph");
      continue;
    }
    for (auto& [low, number] : launch.touched) {
      auto* block = Block::at(low);
      TORCH_CHECK(block && block->number == number, "a graph's ", launch.op->schema().name(), " uses memory that was freed since its capture");
    }
    Stack stack = launch.arguments;
    run(*launch.op, &stack);
    for (size_t i = 0; i < launch.results.size(); ++i) {
      if (!launch.results[i].isTensor() || !launch.results[i].toTensor().defined()) continue;
      const auto& old = launch.results[i].toTensor();
      const auto& now = stack[i].toTensor();
      if (!old.is_same(now) && old.storage().data() != now.storage().data()) host_alias(old).copy_(host_alias(now));
    }
  }
}
// A kernel that is Python here begins; `replaying` leaves it uncounted.
void begin(const std::string& name, int64_t device) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  begin_launch(static_cast<int>(device));
  count(kLaunch, name);
}

// Record what such a kernel touches: pairs of addresses, from and to. A GPU computes at a replay alone.
void touch(c10::IntArrayRef ranges, bool write, bool scattered, const std::string& name, int64_t device) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  const bool capture = recording && !replaying;
  for (size_t i = 0; i + 1 < ranges.size(); i += 2) {
    auto *low = reinterpret_cast<const char*>(ranges[i]), *high = reinterpret_cast<const char*>(ranges[i + 1]);
    auto* block = Block::at(low);
    TORCH_CHECK(block && high <= block->high, name, write ? " writes " : " reads ", high - low,
                " bytes that no tensor of the device holds as a whole");
    if (!capture) access(block, current_stream[device], low, high, write, scattered, name);
  }
}
at::Tensor host_view(const at::Tensor& tensor) { return tensor.is_cuda() ? host_alias(tensor) : tensor; }

// Give a new CPU tensor to the device without a copy.
at::Tensor adopt(const at::Tensor& tensor, int64_t device) {
  count(kAllocation, "result of a kernel");
  return with_storage(cuda_storage(new Block{tensor.storage()}, static_cast<int>(device)), tensor, kCUDA);
}

// ---- what torch asks of a device ------------------------------------------------------------------------------
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return {kCUDA, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) current_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { setDevice(d); }
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, d, current_stream[d.index()]);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    current_stream[s.device_index()] = static_cast<int>(s.id());
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

bool pinned(const void* data) {
  auto* block = Block::at(data);
  return block && block->pinned;
}

struct PinnedAllocator final : c10::Allocator {
  static void unpin(void* data) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto* block = Block::at(data);
    forget(block);
    delete block;
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(kPage, (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage);  // its own pages
    new Block(static_cast<const char*>(data), bytes);
    return {data, data, &unpin, c10::Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
PinnedAllocator pinned_allocator;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(::current_device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(::current_device); }
  void setCurrentDevice(c10::DeviceIndex d) const override { ::current_device = d; }
  int getNumGPUs() const override { return kDevices; }
  at::Device getDeviceFromPtr(void*) const override { return {kCUDA, static_cast<c10::DeviceIndex>(::current_device)}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
// torch has made its hooks by the time that this library is loaded; they have no members, so a vtable is all they are.
const bool hooks_are_ours = [] {
  static CUDAHooks ours{at::CUDAHooksArgs{}};
  auto* torch_s = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(torch_s) = *reinterpret_cast<void**>(&ours);
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// These are composite on a GPU, and their kernels look for a compiled CUDA kernel.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char* name : {"copy_"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// torch's own kernels give CUDA tensors to NCCL.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const char* name : {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_", "allreduce_coalesced_",
                           "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
                           "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_", "scatter_",
                           "alltoall_", "alltoall_base_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY(virtual_gpu, m) {
  m.def("host(Tensor(a) tensor) -> Tensor(a)");
  m.def("adopt(Tensor tensor, int device) -> Tensor");
  m.def("begin(str name, int device) -> ()", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &begin));
  m.def("touch(int[] ranges, bool write, bool scattered, str name, int device) -> ()",
        torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &touch));
  m.def("replay(int graph) -> ()", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &replay));
}
TORCH_LIBRARY_IMPL(virtual_gpu, CUDA, m) { m.impl("host", &host_view); }
TORCH_LIBRARY_IMPL(virtual_gpu, CPU, m) {
  m.impl("host", &host_view);
  m.impl("adopt", &adopt);
}

// ---- for ctypes -----------------------------------------------------------------------------------------------
extern "C" {

int vg_device() { return current_device; }
void vg_set_device(int device) { current_device = device; }
int vg_stream(int device) { return current_stream[device]; }
void vg_set_stream(int device, int stream) { current_stream[device] = stream; }
int vg_new_stream() {
  std::lock_guard<std::recursive_mutex> guard(lock);
  return next_stream < kStreams ? static_cast<int>(next_stream++) : -1;
}

int64_t vg_record(int stream, int64_t event) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (!event) event = next_event++;
  join(clocks[stream], host);
  events[event] = clocks[stream];
  return event;
}
void vg_wait(int stream, int64_t event) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  join(clocks[stream], events[event]);
}
// Take notice that an event has passed, as the host learns from a query; see vg_synchronize.
void vg_query(int64_t event) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (event >= 0) host_waits(events[event]);
  else if (-1 - event < kStreams) host_waits(clocks[-1 - event]);
  else for (const auto& clock : clocks) host_waits(clock);
}
// event < 0: a stream, as -1 - stream, or all if that is no stream. Returns false where a graph is being captured.
bool vg_synchronize(int64_t event, const char* name) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  if (capturing) return false;
  ++counts[kSynchronization][name];
  vg_query(event);
  return true;
}

// Memory that may be overwritten while it is read; see unordered.py.
void vg_unordered(const void* data) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto* block = Block::at(data);
  if (!block) return;
  block->unordered = true;
  forget(block);
}
bool vg_holds(const char* low, const char* high) {
  auto* block = Block::at(low);
  return block && high <= block->high;
}
// The name of a race that no launch has raised yet: at most `size` characters.
void vg_race(char* out, size_t size) { std::snprintf(out, size, "%s", race.c_str()); }

void vg_reset() {
  std::lock_guard<std::recursive_mutex> guard(lock);
  for (auto& kind : counts) kind.clear();
}
// Lines of "kind<TAB>name<TAB>number"; the caller's buffer is large.
void vg_report(char* out, size_t size) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  std::string text;
  for (int kind = 0; kind < kKinds; ++kind)
    for (auto& [name, number] : counts[kind]) text += std::string(kNames[kind]) + "\t" + name + "\t" + std::to_string(number) + "\n";
  std::snprintf(out, size, "%s", text.c_str());
}

void vg_capture_begin(int64_t graph) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  capturing = true;
  recorded = graph, recording = &graphs[graph], pools[graph];
}
void vg_capture_end() {
  std::lock_guard<std::recursive_mutex> guard(lock);
  capturing = false;
  recorded = 0, recording = nullptr;
}
bool vg_capturing() { return capturing; }
void vg_callback(Callback function) { callback = function; }
void vg_record_call(int64_t id) {
  if (recording) recording->push_back({nullptr, {}, {}, id, {}});
}
void vg_forget(int64_t graph) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  graphs.erase(graph), pools.erase(graph);
}
}
