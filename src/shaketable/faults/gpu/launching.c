/* Launches of kernels whose arguments are laid out already: see launcher.py and coding.py.

   A module for Python, because what a card waits for in a small model is Python: the same functions through ctypes take six
   times as long to be called, 210 times a pass. Whoever has Triton has what this is compiled with. Python's lock is held from
   the first argument to the launch: several threads may share what is written to here. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef int (*Launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

typedef struct {
  Launch launch;
  void* function;
  uint32_t blocks, threads, shared, spare;
  uint64_t* address;
  int32_t* row;
  void** arguments;
  uint64_t* target;
} Strike;

/* SplitMix64's finalizer, as in generator.py. */
static uint64_t mix64(uint64_t v) {
  v += 0x9E3779B97F4A7C15ull;
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  return v ^ (v >> 31);
}

static uint64_t word(PyObject* value) { return PyLong_AsUnsignedLongLongMask(value); }

/* What the driver returned, as a number of Python; or the error that an argument was. */
static PyObject* go(const Strike* s, PyObject* stream) {
  void* on = PyLong_AsVoidPtr(stream);
  if (PyErr_Occurred()) return NULL;
  return PyLong_FromLong(s->launch(s->function, s->blocks, 1, 1, s->threads, 1, 1, s->shared, on, s->arguments, NULL));
}

static const Strike* of(PyObject* const* given, Py_ssize_t n, Py_ssize_t wanted) {
  if (n != wanted) {
    PyErr_Format(PyExc_TypeError, "%zd arguments, and not %zd", n, wanted);
    return NULL;
  }
  return PyLong_AsVoidPtr(given[0]);
}

static PyObject* strike(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  const Strike* s = of(given, n, 4);
  if (s == NULL) return NULL;
  *s->address = word(given[1]);
  *s->row = (int32_t)word(given[2]);
  return go(s, given[3]);
}

static PyObject* strike_into(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  const Strike* s = of(given, n, 4);
  if (s == NULL) return NULL;
  *s->address = word(given[1]);
  *s->target = word(given[2]);
  return go(s, given[3]);
}

static PyObject* strike_keyed(PyObject* self, PyObject* const* given, Py_ssize_t n) {
  const Strike* s = of(given, n, 6);
  if (s == NULL) return NULL;
  uint64_t mixed = mix64(word(given[3]) ^ mix64(word(given[4])));
  s->address[0] = word(given[1]);
  s->address[1] = word(given[2]);
  s->row[0] = (int32_t)(uint32_t)mixed;
  s->row[1] = (int32_t)(uint32_t)(mixed >> 32);
  return go(s, given[5]);
}

static PyMethodDef functions[] = {
  {"strike", (PyCFunction)(void (*)(void))strike, METH_FASTCALL,
   "Of a strike: an address, the row of a board, the stream."},
  {"strike_into", (PyCFunction)(void (*)(void))strike_into, METH_FASTCALL,
   "Of a strike: the address it reads from, the one it writes to, the stream."},
  {"strike_keyed", (PyCFunction)(void (*)(void))strike_keyed, METH_FASTCALL,
   "Of a strike: source, target, the key of a tap, the moment it is mixed with, the stream."},
  {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "shaketable_launching", NULL, -1, functions};

PyMODINIT_FUNC PyInit_shaketable_launching(void) { return PyModule_Create(&module); }
