// torch's C++ side of CUDA on a machine without a GPU: two devices, streams and events that do nothing, generators of
// the CPU, pinned memory that is only marked, and a count of the bytes that tensors on a device take.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace {

constexpr c10::DeviceIndex DEVICES = 2;
constexpr size_t BLOCK = 512; // bytes; CUDA's allocator rounds up to them
constexpr size_t PAGE = 4096, ALIGNMENT = 64; // bytes; the latter as torch's on a CPU
constexpr int GARBAGE = 0xff; // in new memory: NaN, or -1

// ---- memory: each block ends where the process may not read or write

std::atomic<int64_t> allocated[DEVICES], peak[DEVICES];
thread_local int allocating_device = -1; // -1: the host
thread_local c10::DeviceIndex device_now = 0;

struct Block {
  char* pages; // the first and the last one must not be touched
  size_t length;
  int64_t bytes;
  int device;
};
// Tensors that live until the process ends are freed after this file's destructors would have run: none runs.
auto& blocks_lock = *new std::mutex;
auto& blocks = *new std::unordered_map<void*, Block>; // on a device, by their addresses

// oneDNN allocates and frees by address alone, on the host and on a device.
void free_memory(void* address) {
  {
    std::lock_guard<std::mutex> guard(blocks_lock);
    auto found = blocks.find(address);
    if (found != blocks.end()) {
      const Block block = found->second;
      blocks.erase(found);
      allocated[block.device] -= block.bytes;
      munmap(block.pages, block.length);
      return;
    }
  }
  c10::GetDefaultCPUAllocator()->raw_deleter()(address);
}

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

struct CountingAllocator : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (allocating_device < 0 || bytes == 0) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    Block block{nullptr, rounded(bytes, PAGE) + 2 * PAGE, static_cast<int64_t>(rounded(bytes, BLOCK)), allocating_device};
    void* mapped = mmap(nullptr, block.length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "the pretended device is out of memory");
    block.pages = static_cast<char*>(mapped);
    char* const first = block.pages + PAGE;
    char* const last = block.pages + block.length - PAGE;
    mprotect(first, last - first, PROT_READ | PROT_WRITE);
    std::memset(first, GARBAGE, last - first);
    void* address = last - rounded(bytes, ALIGNMENT);
    const int64_t now = allocated[block.device] += block.bytes;
    int64_t before = peak[block.device];
    while (before < now && !peak[block.device].compare_exchange_weak(before, now)) {
    }
    std::lock_guard<std::mutex> guard(blocks_lock);
    blocks[address] = block;
    return {address, address, free_memory, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_memory; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

auto& pinned_lock = *new std::mutex;
auto& pinned = *new std::map<const char*, size_t>; // first address -> bytes

struct PinnedAllocator : c10::Allocator {
  struct Pinned {
    c10::DataPtr memory;
  };
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* address = memory.get();
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<const char*>(address)] = bytes;
    return {address, new Pinned{std::move(memory)}, unpin, c10::Device(c10::DeviceType::CPU)};
  }
  static void unpin(void* context) {
    auto* freed = static_cast<Pinned*>(context);
    {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned.erase(static_cast<const char*>(freed->memory.get()));
    }
    delete freed;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

auto& counting_allocator = *new CountingAllocator;
auto& pinned_allocator = *new PinnedAllocator;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto next = pinned.upper_bound(static_cast<const char*>(address));
  if (next == pinned.begin()) return false;
  const auto& [first, bytes] = *std::prev(next);
  return static_cast<const char*>(address) < first + std::max<size_t>(bytes, 1);
}

// ---- devices

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  int getNumGPUs() const override { return DEVICES; }
  c10::DeviceIndex current_device() const override { return device_now; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(device_now, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
};

c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs> registered(
    "CUDAHooks", c10::REGISTRY_PREFERRED, at::CUDAHooksRegistry(),
    c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs>::DefaultCreator<Hooks>);

c10::Stream default_stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }

// autograd runs the backward pass of a device in a thread of its own, and asks for streams and events.
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, device_now}; }
  void setDevice(c10::Device device) const override { device_now = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {c10::DeviceType::CUDA, std::exchange(device_now, device.index())};
  }
  c10::Stream getStream(c10::Device device) const noexcept override { return default_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return default_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};


} // namespace

// Called from Python through ctypes.
extern "C" {
// After torch's own libraries have been loaded: those of a build for CUDA register a guard of their own.
void install() {
  c10::SetCPUAllocator(&counting_allocator, /*priority=*/1);
  c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard());
}
int allocate_on(int device) { return std::exchange(allocating_device, device); }
int64_t allocated_bytes(int device) { return allocated[device]; }
int64_t peak_bytes(int device) { return peak[device]; }
void reset_peak(int device) { peak[device] = allocated[device].load(); }
int current_device() { return device_now; }
void set_device(int device) { device_now = static_cast<c10::DeviceIndex>(device); }
}
