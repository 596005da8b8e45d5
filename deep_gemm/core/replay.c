// Replays records of calls: see record.py for what a record is, replay.py for what a replay means.
//
// This file includes neither torch nor CUDA. It reads tensors through DLPack's exchange table and launches through the
// driver's functions; replay.py passes the pointers to both. The GIL is held throughout, so only one thread at a time
// uses a record's memory. If a record does not serve a call, a replay changes nothing and returns NotImplemented.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifdef Py_GIL_DISABLED
#error "replay.c needs the GIL; replay.py serves builds without one"
#endif

enum { kMostTensors = 16, kMostDimensions = 5, kMostStated = 256, kMostSteps = 2048, kMapBytes = 128, kMapAlignment = 64 };

// ---- Types of DLPack, as in dlpack.h of version 1 ----

typedef struct {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} Tensor;

typedef struct {
  uint32_t major, minor;
  void* older;
  void *allocate, *managed_from, *managed_to;
  int (*read)(void* object, Tensor* out);
  int (*current_stream)(int32_t device_type, int32_t device, void** stream);
} Exchange;

// ---- Types of the driver, as in cuda.h ----

typedef struct {
  int id;
  char pad[4];
  union {
    char bytes[64];
    unsigned cluster[3];
    int flag;
  } value;
} Attribute;

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
} Config;

enum { kClusterDimension = 4, kProgrammaticSerialization = 6 };

typedef int (*LaunchFunction)(const Config*, void* function, void** params, void** extra);
typedef int (*EncodeFunction)(void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                              const uint64_t* strides, const uint32_t* box, const uint32_t* ones, int interleave,
                              int swizzle, int promotion, int fill);
typedef int (*DeviceFunction)(int* device);

static struct {
  const Exchange* exchange;
  LaunchFunction launch;
  EncodeFunction encode;
  DeviceFunction device;
  PyObject *tensor, *parameter, *empty_strided, *is_grad_enabled, *failed, *requires_grad, *is_neg, *as_strided, *parts;
} host;

// ---- Records ----

enum Op { kConstant, kSize, kStride, kAdd, kSubtract, kMultiply, kDivide, kRemainder, kLeast, kMost, kStated };
enum { kBelow, kEqual };
enum { kTensor, kResult, kScratch };

typedef struct {
  int32_t op;
  int64_t a, b;
} Step;

typedef struct {
  int32_t relation, a, b, holds;
} Condition;

typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
  int32_t ndim, may_be_negated;
  int64_t sizes[kMostDimensions], strides[kMostDimensions];  // -1: free
} Given;

typedef struct {
  int32_t base, index, behind;
} Address;

typedef struct {
  uint32_t at, size, number, has_address;
  Address address;
} Word;

typedef struct {
  uint32_t at, rank;
  Address address;
  int32_t type, swizzle;
  int32_t sizes[kMostDimensions], strides[kMostDimensions], box[kMostDimensions];
  // The address and numbers of the map that the parameters hold now.
  int is_encoded;
  uint64_t address_now, sizes_now[kMostDimensions], strides_now[kMostDimensions];
  uint32_t box_now[kMostDimensions];
} Map;

typedef struct {
  void* function;
  int32_t grid;
  uint32_t num_words, num_maps, num_bytes;
  Config config;
  Attribute attributes[2];
  char* memory;  // the allocation
  char* params;  // within the allocation, aligned for maps
  Word* words;
  Map* maps;
} Launch;

typedef struct {
  int32_t ndim, view_ndim;  // of the tensor, and of the view that the caller gets (-1: no view)
  int32_t sizes[kMostDimensions], strides[kMostDimensions], view_sizes[kMostDimensions], view_strides[kMostDimensions];
  PyObject* how;  // keywords of torch.empty_strided
} Made;

typedef struct {
  PyObject_HEAD
  int32_t device_type, device;
  Py_ssize_t num_given, num_stated, num_steps, num_conditions, num_outputs, num_made, num_launches;
  Given* given;
  Step* steps;
  Condition* conditions;
  Made* made;
  Launch* launches;
  int32_t scratch;
  PyObject* how_scratch;
  PyObject* kept;  // launchers, so that their kernels stay loaded
} Record;

// ---- Reading a record that Python passes ----

static int malformed(const char* what) {
  PyErr_Format(PyExc_ValueError, "record: %s", what);
  return -1;
}

// Reads an item of a tuple as an integer.
static int64_t integer(PyObject* tuple, Py_ssize_t index) {
  PyObject* item = PyTuple_GetItem(tuple, index);
  return item == NULL ? -1 : PyLong_AsLongLong(item);
}

static int32_t place(PyObject* tuple, Py_ssize_t index, int64_t below) {
  int64_t number = integer(tuple, index);
  if (PyErr_Occurred()) return -1;
  if (number < 0 || number >= below) {
    malformed("an index is out of range");
    return -1;
  }
  return (int32_t)number;
}

static int is_tuple_of(PyObject* x, Py_ssize_t size) {
  return x != NULL && PyTuple_Check(x) && (size < 0 || PyTuple_Size(x) == size);
}

static void* room(Py_ssize_t count, size_t size) { return PyMem_Calloc(count > 0 ? (size_t)count : 1, size); }

// Reads places of numbers into `out`, and returns their count.
static int places(PyObject* tuple, int32_t* out, int64_t below) {
  if (!is_tuple_of(tuple, -1) || PyTuple_Size(tuple) > kMostDimensions) return malformed("too many dimensions");
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) {
    out[i] = place(tuple, i, below);
    if (PyErr_Occurred()) return -1;
  }
  return (int)PyTuple_Size(tuple);
}

static int read_address(Record* r, PyObject* tuple, Address* out) {
  if (!is_tuple_of(tuple, 3)) return malformed("an address has a base, an index and a number");
  out->base = place(tuple, 0, 3);
  if (PyErr_Occurred()) return -1;
  int64_t most = out->base == kTensor ? r->num_given : out->base == kResult ? r->num_made : 1;
  out->index = place(tuple, 1, most);
  if (PyErr_Occurred()) return -1;
  out->behind = place(tuple, 2, r->num_steps);
  return PyErr_Occurred() ? -1 : 0;
}

static int read_steps(Record* r, PyObject* steps) {
  for (Py_ssize_t i = 0; i < r->num_steps; ++i) {
    PyObject* each = PyTuple_GetItem(steps, i);
    if (!is_tuple_of(each, 3)) return malformed("a step has an operation and two numbers");
    Step* step = &r->steps[i];
    step->op = place(each, 0, kStated + 1);
    if (PyErr_Occurred()) return -1;
    step->a = integer(each, 1);
    step->b = integer(each, 2);
    if (PyErr_Occurred()) return -1;
    if (step->op == kConstant) continue;
    if (step->op == kStated) {
      if (step->a < 0 || step->a >= r->num_stated) return malformed("a step reads an integer that is not stated");
      continue;
    }
    int reads = step->op == kSize || step->op == kStride;
    int64_t below = reads ? r->num_given : i;
    if (step->a < 0 || step->a >= below) return malformed("a step must read an earlier value");
    int64_t most = reads ? r->given[step->a].ndim : i;
    if (step->b < 0 || step->b >= most) return malformed("a step must read an earlier value");
  }
  return 0;
}

static int read_given(Record* r, PyObject* given) {
  for (Py_ssize_t i = 0; i < r->num_given; ++i) {
    PyObject* each = PyTuple_GetItem(given, i);  // (code, bits, lanes, may be negated, sizes, strides)
    if (!is_tuple_of(each, 6)) return malformed("a tensor has six facts");
    Given* g = &r->given[i];
    g->code = (uint8_t)integer(each, 0);
    g->bits = (uint8_t)integer(each, 1);
    g->lanes = (uint16_t)integer(each, 2);
    g->may_be_negated = (int32_t)integer(each, 3);
    PyObject *sizes = PyTuple_GetItem(each, 4), *strides = PyTuple_GetItem(each, 5);
    if (!is_tuple_of(sizes, -1) || PyTuple_Size(sizes) > kMostDimensions || !is_tuple_of(strides, PyTuple_Size(sizes)))
      return malformed("a tensor has at most 5 dimensions");
    g->ndim = (int32_t)PyTuple_Size(sizes);
    for (int d = 0; d < g->ndim; ++d) {
      g->sizes[d] = integer(sizes, d);
      g->strides[d] = integer(strides, d);
    }
    if (PyErr_Occurred()) return -1;
  }
  return 0;
}

static int read_conditions(Record* r, PyObject* conditions) {
  for (Py_ssize_t i = 0; i < r->num_conditions; ++i) {
    PyObject* each = PyTuple_GetItem(conditions, i);
    if (!is_tuple_of(each, 4)) return malformed("a condition has four parts");
    Condition* c = &r->conditions[i];
    c->relation = place(each, 0, kEqual + 1);
    if (PyErr_Occurred()) return -1;
    c->a = place(each, 1, r->num_steps);
    if (PyErr_Occurred()) return -1;
    c->b = place(each, 2, r->num_steps);
    if (PyErr_Occurred()) return -1;
    c->holds = integer(each, 3) != 0;
    if (PyErr_Occurred()) return -1;
  }
  return 0;
}

static int read_made(Record* r, PyObject* made) {
  for (Py_ssize_t i = 0; i < r->num_made; ++i) {
    PyObject* each = PyTuple_GetItem(made, i);
    if (!is_tuple_of(each, 5)) return malformed("a result needs sizes, strides, keywords and a view");
    Made* m = &r->made[i];
    m->ndim = places(PyTuple_GetItem(each, 0), m->sizes, r->num_steps);
    if (m->ndim < 0) return -1;
    int ndim = places(PyTuple_GetItem(each, 1), m->strides, r->num_steps);
    if (ndim < 0) return -1;
    if (ndim != m->ndim) return malformed("a result has as many strides as sizes");
    m->view_ndim = -1;
    if (PyTuple_GetItem(each, 3) != Py_None) {
      m->view_ndim = places(PyTuple_GetItem(each, 3), m->view_sizes, r->num_steps);
      if (m->view_ndim < 0 || places(PyTuple_GetItem(each, 4), m->view_strides, r->num_steps) != m->view_ndim)
        return PyErr_Occurred() ? -1 : malformed("a view has as many strides as sizes");
    }
    m->how = Py_NewRef(PyTuple_GetItem(each, 2));
  }
  return 0;
}

static int read_launch(Record* r, PyObject* given, Launch* l) {
  // (function, threads, shared bytes, cluster, is dependent, grid, params, words, maps)
  if (!is_tuple_of(given, 9)) return malformed("a launch has nine parts");
  l->function = PyLong_AsVoidPtr(PyTuple_GetItem(given, 0));
  if (PyErr_Occurred()) return -1;
  l->config.block[0] = (unsigned)integer(given, 1);
  l->config.shared_bytes = (unsigned)integer(given, 2);
  int64_t cluster = integer(given, 3), is_dependent = integer(given, 4);
  l->grid = place(given, 5, r->num_steps);
  if (PyErr_Occurred()) return -1;
  for (int i = 0; i < 3; ++i) {
    l->config.grid[i] = 1;
    if (i) l->config.block[i] = 1;
  }
  l->config.attributes = l->attributes;
  if (cluster > 1) {
    Attribute* a = &l->attributes[l->config.num_attributes++];
    a->id = kClusterDimension;
    a->value.cluster[0] = (unsigned)cluster;
    a->value.cluster[1] = a->value.cluster[2] = 1;
  }
  if (is_dependent) {
    Attribute* a = &l->attributes[l->config.num_attributes++];
    a->id = kProgrammaticSerialization;
    a->value.flag = 1;
  }
  PyObject *params = PyTuple_GetItem(given, 6), *words = PyTuple_GetItem(given, 7), *maps = PyTuple_GetItem(given, 8);
  char* bytes;
  Py_ssize_t num_bytes;
  if (PyBytes_AsStringAndSize(params, &bytes, &num_bytes) < 0) return -1;
  if (!is_tuple_of(words, -1) || !is_tuple_of(maps, -1)) return malformed("words and maps are tuples");
  l->num_bytes = (uint32_t)num_bytes;
  l->num_words = (uint32_t)PyTuple_Size(words);
  l->num_maps = (uint32_t)PyTuple_Size(maps);
  l->memory = room(num_bytes + kMapAlignment, 1);
  l->words = room(l->num_words, sizeof(Word));
  l->maps = room(l->num_maps, sizeof(Map));
  if (l->memory == NULL || l->words == NULL || l->maps == NULL) return PyErr_NoMemory(), -1;
  l->params = l->memory + (-(uintptr_t)l->memory & (kMapAlignment - 1));
  memcpy(l->params, bytes, (size_t)num_bytes);
  for (uint32_t i = 0; i < l->num_words; ++i) {
    PyObject* each = PyTuple_GetItem(words, i);
    if (!is_tuple_of(each, 4)) return malformed("a word has four parts");
    Word* w = &l->words[i];
    w->size = (uint32_t)place(each, 1, 9);
    if (PyErr_Occurred()) return -1;
    if (w->size != 4 && w->size != 8) return malformed("a word has 4 or 8 bytes");
    w->at = (uint32_t)place(each, 0, num_bytes - w->size + 1);
    if (PyErr_Occurred()) return -1;
    w->number = (uint32_t)place(each, 2, r->num_steps);
    if (PyErr_Occurred()) return -1;
    PyObject* address = PyTuple_GetItem(each, 3);
    w->has_address = address != Py_None;
    if (w->has_address && read_address(r, address, &w->address) < 0) return -1;
    if (w->has_address && w->size != 8) return malformed("an address has 8 bytes");
  }
  for (uint32_t i = 0; i < l->num_maps; ++i) {
    PyObject* each = PyTuple_GetItem(maps, i);
    if (!is_tuple_of(each, 7)) return malformed("a map has seven parts");
    Map* m = &l->maps[i];
    m->at = (uint32_t)place(each, 0, num_bytes - kMapBytes + 1);
    if (PyErr_Occurred() || read_address(r, PyTuple_GetItem(each, 1), &m->address) < 0) return -1;
    if (m->at % kMapAlignment) return malformed("a map must begin at a multiple of 64 bytes");
    m->type = (int32_t)integer(each, 2);
    m->swizzle = (int32_t)integer(each, 3);
    int rank = places(PyTuple_GetItem(each, 4), m->sizes, r->num_steps);
    if (rank < 0) return -1;
    int strides = places(PyTuple_GetItem(each, 5), m->strides, r->num_steps);
    if (strides < 0) return -1;
    int extents = places(PyTuple_GetItem(each, 6), m->box, r->num_steps);
    if (extents < 0) return -1;
    if (rank < 1 || strides != rank - 1 || extents != rank) return malformed("a map's dimensions do not match");
    m->rank = (uint32_t)rank;
  }
  return PyErr_Occurred() ? -1 : 0;
}

// ---- Replaying ----

static int64_t floor_divide(int64_t a, int64_t b) {
  int64_t quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

// Computes the steps from `i` to `until` - 1. Returns 0 if a number cannot be computed.
static int compute(const Record* r, const Tensor* tensors, const int64_t* stated, int64_t* v, Py_ssize_t i,
                   Py_ssize_t until) {
  for (; i < until; ++i) {
    const Step* s = &r->steps[i];
    switch (s->op) {
      case kConstant: v[i] = s->a; break;
      case kSize: v[i] = tensors[s->a].shape[s->b]; break;
      case kStride: v[i] = tensors[s->a].strides[s->b]; break;
      case kStated: v[i] = stated[s->a]; break;
      case kAdd:
        if (__builtin_add_overflow(v[s->a], v[s->b], &v[i])) return 0;
        break;
      case kSubtract:
        if (__builtin_sub_overflow(v[s->a], v[s->b], &v[i])) return 0;
        break;
      case kMultiply:
        if (__builtin_mul_overflow(v[s->a], v[s->b], &v[i])) return 0;
        break;
      case kDivide:
      case kRemainder: {
        int64_t a = v[s->a], b = v[s->b];
        if (b == 0 || b == -1) return 0;  // the record does not serve such a call
        int64_t quotient = floor_divide(a, b);
        v[i] = s->op == kDivide ? quotient : a - quotient * b;
        break;
      }
      case kLeast: v[i] = v[s->a] < v[s->b] ? v[s->a] : v[s->b]; break;
      default: v[i] = v[s->a] > v[s->b] ? v[s->a] : v[s->b]; break;
    }
  }
  return 1;
}

static uint64_t begin(const Tensor* x) { return (uintptr_t)x->data + x->byte_offset; }

// Returns the address behind a tensor's last element.
static uint64_t end(const Tensor* x) {
  int64_t last = 0;
  for (int d = 0; d < x->ndim; ++d) last += (x->shape[d] - 1) * x->strides[d];
  return begin(x) + (uint64_t)((last + 1) * x->bits * x->lanes / 8);
}

// Computes a record's numbers for tensors. Returns 0 if the record does not serve the tensors. The caller owns `v`:
// while torch makes a tensor, another thread may replay the same record.
static int serves(const Record* r, const Tensor* tensors, const int64_t* stated, int64_t* v) {
  for (Py_ssize_t i = 0; i < r->num_given; ++i) {
    const Given* g = &r->given[i];
    const Tensor* x = &tensors[i];
    if (x->code != g->code || x->bits != g->bits || x->lanes != g->lanes || x->ndim != g->ndim ||
        x->device_type != r->device_type || x->device_id != r->device)
      return 0;
    for (int d = 0; d < g->ndim; ++d) {
      if (g->sizes[d] >= 0 && x->shape[d] != g->sizes[d]) return 0;
      if (g->strides[d] >= 0 && x->strides[d] != g->strides[d]) return 0;
    }
  }
  Py_ssize_t i = 0;
  for (Py_ssize_t each = 0; each <= r->num_conditions; ++each) {
    // Conditions are sorted by their later number. Most records for other rows fail at the first condition.
    const Condition* c = each < r->num_conditions ? &r->conditions[each] : NULL;
    Py_ssize_t until = c == NULL ? r->num_steps : (c->a > c->b ? c->a : c->b) + 1;
    if (!compute(r, tensors, stated, v, i, until)) return 0;
    if (until > i) i = until;
    if (c != NULL && (c->relation == kBelow ? v[c->a] < v[c->b] : v[c->a] == v[c->b]) != c->holds) return 0;
  }
  for (Py_ssize_t output = r->num_given - r->num_outputs; output < r->num_given; ++output)
    for (Py_ssize_t other = 0; other < output; ++other)
      if (begin(&tensors[output]) < end(&tensors[other]) && begin(&tensors[other]) < end(&tensors[output])) return 0;
  return 1;
}

static PyObject* tuple_of(const int64_t* v, const int32_t* which, int count) {
  PyObject* made = PyTuple_New(count);
  for (int i = 0; made != NULL && i < count; ++i) {
    PyObject* number = PyLong_FromLongLong(v[which[i]]);
    if (number == NULL || PyTuple_SetItem(made, i, number) < 0) Py_CLEAR(made);
  }
  return made;
}

static PyObject* empty(const int64_t* v, const int32_t* sizes, const int32_t* strides, int ndim, PyObject* how) {
  PyObject *a = tuple_of(v, sizes, ndim), *b = tuple_of(v, strides, ndim), *made = NULL;
  PyObject* arguments = a != NULL && b != NULL ? PyTuple_Pack(2, a, b) : NULL;
  if (arguments != NULL) made = PyObject_Call(host.empty_strided, arguments, how);
  Py_XDECREF(a);
  Py_XDECREF(b);
  Py_XDECREF(arguments);
  return made;
}

static int begins(PyObject* x, uint64_t* at) {
  Tensor read;
  if (host.exchange->read(x, &read) != 0) return -1;
  *at = begin(&read);
  return 0;
}

// Encodes a map if its address or one of its numbers has changed. Returns the driver's status.
static int encode(Map* m, const int64_t* v, uint64_t address, char* params) {
  int same = m->is_encoded && m->address_now == address;
  m->address_now = address;
  for (uint32_t d = 0; d < m->rank; ++d) {
    uint64_t size = (uint64_t)v[m->sizes[d]], stride = d + 1 < m->rank ? (uint64_t)v[m->strides[d]] : 0;
    uint32_t extent = (uint32_t)v[m->box[d]];
    same = same && size == m->sizes_now[d] && stride == m->strides_now[d] && extent == m->box_now[d];
    m->sizes_now[d] = size;
    m->strides_now[d] = stride;
    m->box_now[d] = extent;
  }
  if (same) return 0;
  static const uint32_t ones[kMostDimensions] = {1, 1, 1, 1, 1};
  int status = host.encode(params + m->at, m->type, m->rank, (void*)(uintptr_t)address, m->sizes_now, m->strides_now,
                           m->box_now, ones, 0, m->swizzle, 3 /* lines of 256 bytes */, 0);
  m->is_encoded = status == 0;
  return status;
}

// Starts all launches. Returns the driver's status, and sets `which` to the launch that failed. No line of it runs
// Python: otherwise another thread could write to a launch's parameters before the driver has read them.
static int launch_all(Record* r, const int64_t* v, const uint64_t* const* beginnings, void* stream, Py_ssize_t* which) {
  for (Py_ssize_t i = 0; i < r->num_launches; ++i) {
    Launch* l = &r->launches[i];
    *which = i;
    for (uint32_t w = 0; w < l->num_words; ++w) {
      const Word* word = &l->words[w];
      uint64_t value = word->has_address ? beginnings[word->address.base][word->address.index] +
                                               (uint64_t)v[word->address.behind]
                                         : (uint64_t)v[word->number];
      memcpy(l->params + word->at, &value, word->size);  // little-endian: the low bytes
    }
    for (uint32_t m = 0; m < l->num_maps; ++m) {
      const Address* a = &l->maps[m].address;
      int status = encode(&l->maps[m], v, beginnings[a->base][a->index] + (uint64_t)v[a->behind], l->params);
      if (status != 0) return status;
    }
    l->config.grid[0] = (unsigned)v[l->grid];
    l->config.stream = stream;
    void* params[1] = {l->params};
    int status = host.launch(&l->config, l->function, params, NULL);
    if (status != 0) return status;
  }
  return 0;
}

static PyObject* no_record(void) { return Py_NewRef(Py_NotImplemented); }

// Returns 1 if a tensor requires a gradient or stores its values negated, so that Python must answer; -1 is an error.
static int wants_python(Record* r, PyObject* const* objects) {
  PyObject* is_on = PyObject_CallNoArgs(host.is_grad_enabled);
  if (is_on == NULL) return -1;
  int grad = is_on == Py_True;
  Py_DECREF(is_on);
  for (Py_ssize_t i = 0; i < r->num_given; ++i) {
    PyObject* answers[2] = {NULL, NULL};
    if (grad) answers[0] = PyObject_GetAttr(objects[i], host.requires_grad);
    if (r->given[i].may_be_negated) answers[1] = PyObject_CallMethodObjArgs(objects[i], host.is_neg, NULL);
    int wants = answers[0] == Py_True || answers[1] == Py_True;
    Py_XDECREF(answers[0]);
    Py_XDECREF(answers[1]);
    if (PyErr_Occurred()) return -1;
    if (wants) return 1;
  }
  return 0;
}

static PyObject* make(Record* r, const int64_t* v, uint64_t* at_made, uint64_t* at_scratch, PyObject** scratch) {
  PyObject* made = PyTuple_New(r->num_made);
  for (Py_ssize_t i = 0; made != NULL && i < r->num_made; ++i) {
    const Made* m = &r->made[i];
    PyObject* x = empty(v, m->sizes, m->strides, m->ndim, m->how);
    if (x != NULL && m->view_ndim >= 0) {
      PyObject *a = tuple_of(v, m->view_sizes, m->view_ndim), *b = tuple_of(v, m->view_strides, m->view_ndim);
      PyObject* view = a != NULL && b != NULL ? PyObject_CallMethodObjArgs(x, host.as_strided, a, b, NULL) : NULL;
      Py_XDECREF(a);
      Py_XDECREF(b);
      Py_DECREF(x);
      x = view;
    }
    if (x == NULL || begins(x, &at_made[i]) < 0 || PyTuple_SetItem(made, i, Py_NewRef(x)) < 0) Py_CLEAR(made);
    Py_XDECREF(x);
  }
  if (made != NULL && v[r->scratch] > 0) {
    int32_t one = 0;  // the first step is the constant 1
    *scratch = empty(v, &r->scratch, &one, 1, r->how_scratch);
    if (*scratch == NULL || begins(*scratch, at_scratch) < 0) Py_CLEAR(made);
  }
  return made;
}

// A call's tensors, as read through torch's exchange table, and the integers that the caller states.
typedef struct {
  Py_ssize_t count;
  PyObject* objects[kMostTensors];
  Tensor tensors[kMostTensors];
  uint64_t at[kMostTensors];
  Py_ssize_t num_stated;
  int64_t stated[kMostStated];
} Call;

// Reads a call's tensors and stated integers. Returns 0 if records do not handle one of them.
static int read_call(PyObject* given, PyObject* stated, Call* call) {
  if (!is_tuple_of(given, -1) || PyTuple_Size(given) > kMostTensors) return 0;
  call->count = PyTuple_Size(given);
  for (Py_ssize_t i = 0; i < call->count; ++i) {
    PyObject* x = call->objects[i] = PyTuple_GetItem(given, i);
    PyObject* type = (PyObject*)Py_TYPE(x);
    if (type != host.tensor && type != host.parameter) return 0;
    if (host.exchange->read(x, &call->tensors[i]) != 0) {
      PyErr_Clear();
      return 0;
    }
    if (call->tensors[i].ndim > kMostDimensions) return 0;
    call->at[i] = begin(&call->tensors[i]);
  }
  if (!is_tuple_of(stated, -1) || PyTuple_Size(stated) > kMostStated) return 0;
  call->num_stated = PyTuple_Size(stated);
  for (Py_ssize_t i = 0; i < call->num_stated; ++i) {
    PyObject* x = PyTuple_GetItem(stated, i);
    if (!PyLong_CheckExact(x)) return 0;
    call->stated[i] = PyLong_AsLongLong(x);
    if (PyErr_Occurred()) {
      PyErr_Clear();
      return 0;
    }
  }
  return 1;
}

// Replays a record for a call. Changes nothing and returns NotImplemented if the record does not serve the call.
static PyObject* replay_call(Record* r, const Call* call) {
  uint64_t at_made[kMostTensors], at_scratch = 0;
  int64_t v[kMostSteps];
  int device;
  if (call->count != r->num_given || call->num_stated != r->num_stated ||
      !serves(r, call->tensors, call->stated, v))
    return no_record();
  if (host.device(&device) != 0 || device != r->device) return no_record();
  int wants = wants_python(r, call->objects);
  if (wants) return wants < 0 ? NULL : no_record();
  PyObject* scratch = NULL;
  PyObject* made = make(r, v, at_made, &at_scratch, &scratch);
  void* stream;
  if (made != NULL && host.exchange->current_stream(r->device_type, r->device, &stream) == 0) {
    const uint64_t* beginnings[3] = {call->at, at_made, &at_scratch};
    Py_ssize_t which = 0;
    int status = launch_all(r, v, beginnings, stream, &which);
    if (status != 0) {
      Py_CLEAR(made);
      PyObject* launcher = PySequence_GetItem(r->kept, which);
      unsigned grid = r->launches[which].config.grid[0];
      if (launcher != NULL) Py_XDECREF(PyObject_CallFunction(host.failed, "OiI", launcher, status, grid));
      Py_XDECREF(launcher);
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a launch failed");
    }
  } else {
    Py_CLEAR(made);
  }
  Py_XDECREF(scratch);  // torch reuses this memory only for work behind the launches on this stream
  return made;
}

// replay(record, tensors, stated) -> results, or NotImplemented if the record does not serve the call.
static PyObject* replay(PyObject* module, PyObject* arguments) {
  (void)module;
  PyObject *record, *given, *stated;
  Call call;
  if (!PyArg_UnpackTuple(arguments, "replay", 3, 3, &record, &given, &stated)) return NULL;
  return read_call(given, stated, &call) ? replay_call((Record*)record, &call) : no_record();
}

// Writes the fixed facts of a call's tensors to `key`. Returns the number of bytes.
static Py_ssize_t write_key(const Call* call, const uint8_t* free_dimensions, int64_t* key) {
  Py_ssize_t n = 0;
  key[n++] = call->num_stated;
  for (Py_ssize_t i = 0; i < call->count; ++i) {
    const Tensor* x = &call->tensors[i];
    const uint8_t free_sizes = free_dimensions[2 * i], free_strides = free_dimensions[2 * i + 1];
    key[n++] = (int64_t)x->code | (int64_t)x->bits << 8 | (int64_t)x->lanes << 16 | (int64_t)x->ndim << 32 |
               (int64_t)(call->at[i] & 15) << 40 | (int64_t)x->device_id << 44;
    for (int d = 0; d < x->ndim; ++d) {
      key[n++] = free_sizes >> d & 1 ? -1 : x->shape[d];
      key[n++] = free_strides >> d & 1 ? -1 : x->strides[d];
    }
  }
  return n * (Py_ssize_t)sizeof *key;
}

// Returns the key of a call as bytes, or None for tensors that records do not handle. `free_dimensions` has two bytes
// for each tensor: bits of the sizes, and bits of the strides, that are not part of the key.
static PyObject* key_of(PyObject* free_dimensions, PyObject* given, PyObject* stated, Call* call) {
  int64_t key[1 + kMostTensors * (1 + 2 * kMostDimensions)];
  char* bits;
  Py_ssize_t num_bits;
  if (PyBytes_AsStringAndSize(free_dimensions, &bits, &num_bits) < 0) return NULL;
  if (!read_call(given, stated, call) || 2 * call->count > num_bits) return Py_NewRef(Py_None);
  return PyBytes_FromStringAndSize((char*)key, write_key(call, (const uint8_t*)bits, key));
}

// name(free, tensors, stated) -> key
static PyObject* name(PyObject* module, PyObject* arguments) {
  (void)module;
  PyObject *free_dimensions, *given, *stated;
  Call call;
  if (!PyArg_UnpackTuple(arguments, "name", 3, 3, &free_dimensions, &given, &stated)) return NULL;
  return key_of(free_dimensions, given, stated, &call);
}

// Replays the first record that serves a call. Returns its results, or NotImplemented if no record serves. `records`
// is a dictionary of a function's records: lists by keys.
static PyObject* recall_from(PyObject* records, PyObject* free_dimensions, PyObject* given, PyObject* stated) {
  PyObject* answer = NULL;
  Call call;
  PyObject* name = key_of(free_dimensions, given, stated, &call);
  if (name == NULL) return NULL;
  PyObject* alike = name == Py_None ? NULL : PyDict_GetItemWithError(records, name);
  if (alike != NULL && PyList_Check(alike)) {
    Py_INCREF(alike);  // hold the list and each record: another thread may drop them while torch makes a tensor
    for (Py_ssize_t i = 0; i < PyList_Size(alike) && (answer == NULL || answer == Py_NotImplemented); ++i) {
      Py_XDECREF(answer);
      PyObject* record = Py_NewRef(PyList_GetItem(alike, i));
      answer = replay_call((Record*)record, &call);
      Py_DECREF(record);
      if (answer == NULL) break;
    }
    Py_DECREF(alike);
  }
  Py_DECREF(name);
  return answer == NULL && !PyErr_Occurred() ? no_record() : answer;
}

// recall(records, free, tensors, stated) -> results, or NotImplemented
static PyObject* recall(PyObject* module, PyObject* const* given, Py_ssize_t count) {
  (void)module;
  return count == 4 ? recall_from(given[0], given[1], given[2], given[3]) : (malformed("expected 4 arguments"), NULL);
}

// Tells whether the values in tuples of options have these types; None is skipped. 128.0 equals 128, but is a mistake.
static int have_types(PyObject* said, PyObject* types, Py_ssize_t* next) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(said); ++i) {
    PyObject* each = PyTuple_GetItem(said, i);
    if (!PyTuple_CheckExact(each)) continue;
    for (Py_ssize_t at = 0; at < PyTuple_Size(each); ++at) {
      PyObject* x = PyTuple_GetItem(each, at);
      if (x == Py_None) continue;
      if (*next >= PyList_Size(types) || PyList_GetItem(types, (*next)++) != (PyObject*)Py_TYPE(x)) return 0;
    }
    if (!have_types(each, types, next)) return 0;
  }
  return 1;
}

// answer(all, function, said, generation, tensors, stated) -> the call's answer, or NotImplemented. The keys of the
// dictionary `all` are (function, said, types of `said`, generation). A value has its records in the attribute `parts`.
static PyObject* answer(PyObject* module, PyObject* const* given, Py_ssize_t count) {
  (void)module;
  if (count != 6 || !is_tuple_of(given[2], -1)) return malformed("expected 6 arguments"), NULL;
  Py_ssize_t num_said = PyTuple_Size(given[2]), next = 0;
  PyObject* key = PyTuple_New(num_said + 3);
  if (key == NULL) return NULL;
  PyTuple_SetItem(key, 0, Py_NewRef(given[1]));
  PyTuple_SetItem(key, 1, Py_NewRef(given[2]));
  for (Py_ssize_t i = 0; i < num_said; ++i)
    PyTuple_SetItem(key, i + 2, Py_NewRef((PyObject*)Py_TYPE(PyTuple_GetItem(given[2], i))));
  PyTuple_SetItem(key, num_said + 2, Py_NewRef(given[3]));
  PyObject *kept = PyDict_GetItemWithError(given[0], key), *made = NULL;
  Py_DECREF(key);
  PyObject* of = kept == NULL ? NULL : PyObject_GetAttr(kept, host.parts);
  if (of == NULL) return PyErr_Occurred() ? NULL : no_record();
  int serves = is_tuple_of(of, 4) && have_types(given[2], PyTuple_GetItem(of, 2), &next);
  made = serves ? recall_from(PyTuple_GetItem(of, 0), PyTuple_GetItem(of, 1), given[4], given[5]) : no_record();
  if (made != NULL && made != Py_NotImplemented) {
    PyObject* results = made;
    made = PyObject_CallFunctionObjArgs(PyTuple_GetItem(of, 3), results, NULL);
    Py_DECREF(results);
  }
  Py_DECREF(of);
  return made;
}

// ---- The type and the module ----

static void record_free(PyObject* self) {
  Record* r = (Record*)self;
  for (Py_ssize_t i = 0; r->launches != NULL && i < r->num_launches; ++i) {
    PyMem_Free(r->launches[i].memory);
    PyMem_Free(r->launches[i].words);
    PyMem_Free(r->launches[i].maps);
  }
  for (Py_ssize_t i = 0; r->made != NULL && i < r->num_made; ++i) Py_XDECREF(r->made[i].how);
  void* rooms[] = {r->given, r->steps, r->conditions, r->made, r->launches};
  for (size_t i = 0; i < sizeof rooms / sizeof *rooms; ++i) PyMem_Free(rooms[i]);
  Py_XDECREF(r->how_scratch);
  Py_XDECREF(r->kept);
  PyTypeObject* type = Py_TYPE(self);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

static PyObject* record_new(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  (void)keywords;
  PyObject *device, *given, *stated, *steps, *conditions, *outputs, *made, *scratch, *launches, *kept;
  if (!PyArg_UnpackTuple(arguments, "Record", 10, 10, &device, &given, &stated, &steps, &conditions, &outputs, &made, &scratch,
                         &launches, &kept))
    return NULL;
  PyObject* lists[] = {given, steps, conditions, made, launches};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; ++i)
    if (!is_tuple_of(lists[i], -1)) return malformed("expected tuples"), NULL;
  if (!is_tuple_of(device, 2) || !is_tuple_of(scratch, 2))
    return malformed("the device and the scratch have two parts"), NULL;
  if (PyTuple_Size(given) > kMostTensors || PyTuple_Size(made) > kMostTensors || PyTuple_Size(steps) > kMostSteps)
    return malformed("too many tensors or numbers"), NULL;
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Record* r = (Record*)allocate(type, 0);
  if (r == NULL) return NULL;
  r->device_type = (int32_t)integer(device, 0);
  r->device = (int32_t)integer(device, 1);
  r->kept = Py_NewRef(kept);
  r->given = room(PyTuple_Size(given), sizeof(Given));
  r->steps = room(PyTuple_Size(steps), sizeof(Step));
  r->conditions = room(PyTuple_Size(conditions), sizeof(Condition));
  r->made = room(PyTuple_Size(made), sizeof(Made));
  r->launches = room(PyTuple_Size(launches), sizeof(Launch));
  if (!r->given || !r->steps || !r->conditions || !r->made || !r->launches) {
    PyErr_NoMemory();
    goto failed;
  }
  r->num_given = PyTuple_Size(given);
  r->num_stated = (Py_ssize_t)PyLong_AsLong(stated);
  r->num_steps = PyTuple_Size(steps);
  r->num_conditions = PyTuple_Size(conditions);
  r->num_outputs = (Py_ssize_t)PyLong_AsLong(outputs);
  r->num_made = PyTuple_Size(made);
  r->num_launches = PyTuple_Size(launches);
  if (PyErr_Occurred() || read_given(r, given) < 0 || read_steps(r, steps) < 0) goto failed;
  if (r->num_steps == 0 || r->steps[0].op != kConstant || r->steps[0].a != 1) {
    malformed("the first number is the constant 1");
    goto failed;
  }
  if (r->num_outputs < 0 || r->num_outputs > r->num_given) {
    malformed("it has more outputs than tensors");
    goto failed;
  }
  if (read_conditions(r, conditions) < 0 || read_made(r, made) < 0) goto failed;
  r->scratch = place(scratch, 0, r->num_steps);
  if (PyErr_Occurred()) goto failed;
  r->how_scratch = Py_NewRef(PyTuple_GetItem(scratch, 1));
  for (Py_ssize_t i = 0; i < r->num_launches; ++i)
    if (read_launch(r, PyTuple_GetItem(launches, i), &r->launches[i]) < 0) goto failed;
  return (PyObject*)r;
failed:
  Py_DECREF(r);
  return NULL;
}

// setup(exchange, launch, encode, device, torch.Tensor, torch.nn.Parameter, torch.empty_strided, torch.is_grad_enabled,
//       failed): stores the pointers. `failed(launcher, status, CTAs)` raises an error
static PyObject* setup(PyObject* module, PyObject* arguments) {
  (void)module;
  PyObject *exchange, *launch, *encode_, *device, *tensor, *parameter, *empty_strided, *is_grad_enabled, *failed;
  if (!PyArg_UnpackTuple(arguments, "setup", 9, 9, &exchange, &launch, &encode_, &device, &tensor, &parameter,
                         &empty_strided, &is_grad_enabled, &failed))
    return NULL;
  const Exchange* table = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
  if (table == NULL) return NULL;
  if (table->major != 1 || table->read == NULL) {
    PyErr_SetString(PyExc_ValueError, "exchange: expected DLPack's table of version 1 that reads tensors");
    return NULL;
  }
  host.exchange = table;
  host.launch = (LaunchFunction)PyLong_AsVoidPtr(launch);
  host.encode = (EncodeFunction)PyLong_AsVoidPtr(encode_);
  host.device = (DeviceFunction)PyLong_AsVoidPtr(device);
  if (PyErr_Occurred()) return NULL;
  host.tensor = Py_NewRef(tensor);
  host.parameter = Py_NewRef(parameter);
  host.empty_strided = Py_NewRef(empty_strided);
  host.is_grad_enabled = Py_NewRef(is_grad_enabled);
  host.failed = Py_NewRef(failed);
  host.requires_grad = PyUnicode_InternFromString("requires_grad");
  host.is_neg = PyUnicode_InternFromString("is_neg");
  host.as_strided = PyUnicode_InternFromString("as_strided");
  host.parts = PyUnicode_InternFromString("parts");
  if (PyErr_Occurred()) return NULL;
  return Py_NewRef(Py_None);
}

// facts(tensor) -> (device type, device, code, bits, lanes), in DLPack's numbers.
static PyObject* facts(PyObject* module, PyObject* x) {
  (void)module;
  Tensor read;
  if (host.exchange == NULL) return PyErr_SetString(PyExc_RuntimeError, "facts: expected setup first"), NULL;
  if (host.exchange->read(x, &read) != 0) return NULL;
  return Py_BuildValue("(iiiii)", read.device_type, read.device_id, read.code, read.bits, read.lanes);
}

static PyMethodDef functions[] = {
    {"setup", setup, METH_VARARGS, "Store the tables and functions that replays use."},
    {"facts", facts, METH_O, "Return a tensor's device and type in DLPack's numbers."},
    {"replay", replay, METH_VARARGS, "Replay a record for tensors that it serves."},
    {"name", name, METH_VARARGS, "Return the key of the records that may serve a call."},
    {"answer", (PyCFunction)(void (*)(void))answer, METH_FASTCALL, "Answer a call by a record of calls like it."},
    {"recall", (PyCFunction)(void (*)(void))recall, METH_FASTCALL, "Replay the first of a function's records that serves these tensors."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot record_slots[] = {
    {Py_tp_new, record_new},
    {Py_tp_dealloc, record_free},
    {Py_tp_doc, "A record of a call, checked and packed for replays."},
    {0, NULL},
};

static PyType_Spec record_spec = {"deep_gemm.core._replay.Record", sizeof(Record), 0, Py_TPFLAGS_DEFAULT, record_slots};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_replay", "Replays records of calls.", -1, functions,
                                 NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__replay(void) {
  PyObject* module = PyModule_Create(&definition);
  if (module == NULL) return NULL;
  PyObject* type = PyType_FromSpec(&record_spec);
  if (type == NULL || PyModule_AddObjectRef(module, "Record", type) < 0) {
    Py_XDECREF(type);
    Py_DECREF(module);
    return NULL;
  }
  Py_DECREF(type);
#ifdef SOURCE_DIGEST  // the digest of this file, which setup.py defines: replay.py refuses a build of an older file
  if (PyModule_AddIntMacro(module, SOURCE_DIGEST) < 0) Py_CLEAR(module);
#endif
  return module;
}
