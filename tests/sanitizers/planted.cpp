// A module of nothing but faults, one a function, built as dcpkernels._C_planted with the flags of a build
// under sanitizers: what a report needs to be seen, in a rank's process too.
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>

namespace {

// Read at run time, so that no compiler sees the fault.
volatile int one = 1;
volatile int zero = 0;
int shared_word = 0;
int* volatile lost = nullptr;

PyObject* number(long value) { return PyLong_FromLong(value); }

PyObject* read_past_the_end(PyObject*, PyObject*) {
  int* words = new int[4]();
  const int value = words[3 + one];
  delete[] words;
  return number(value);
}

PyObject* write_past_the_end(PyObject*, PyObject*) {
  char* bytes = new char[64];
  bytes[63 + one] = 1;
  const int value = bytes[63 + one];
  delete[] bytes;
  return number(value);
}

PyObject* use_after_free(PyObject*, PyObject*) {
  int* word = new int(zero);
  int* volatile copy = word;
  delete word;
  return number(*copy);
}

PyObject* signed_overflow(PyObject*, PyObject*) { return number(std::numeric_limits<int>::max() + one); }

PyObject* misaligned_load(PyObject*, PyObject*) {
  alignas(8) static char bytes[16] = {};
  return number(*reinterpret_cast<const volatile int*>(bytes + one));
}

PyObject* cast_out_of_range(PyObject*, PyObject*) { return number(int(1e30f * float(one))); }

PyObject* shift_too_far(PyObject*, PyObject*) { return number(one << (31 + one)); }

PyObject* copy_from_null(PyObject*, PyObject*) {
  char bytes[1] = {};
  const void* volatile from = nullptr;
  std::memcpy(bytes, from, size_t(zero));
  return number(bytes[0]);
}

PyObject* leak(PyObject*, PyObject*) {
  lost = new int[100]();
  lost = nullptr;
  return number(0);
}

// Without the GIL, so that nothing but these two accesses is there to order them.
PyObject* race(PyObject*, PyObject*) {
  Py_BEGIN_ALLOW_THREADS;
  std::thread other([] { shared_word = 1; });
  shared_word = 2;
  other.join();
  Py_END_ALLOW_THREADS;
  return number(shared_word);
}

// The same ordered by the GIL alone, between Python's own threads: no report may come of it.
PyObject* count_with_gil(PyObject*, PyObject*) { return number(++shared_word); }

#define FAULT(name) {#name, name, METH_NOARGS, nullptr}
PyMethodDef methods[] = {FAULT(read_past_the_end),
                         FAULT(write_past_the_end),
                         FAULT(use_after_free),
                         FAULT(signed_overflow),
                         FAULT(misaligned_load),
                         FAULT(cast_out_of_range),
                         FAULT(shift_too_far),
                         FAULT(copy_from_null),
                         FAULT(leak),
                         FAULT(race),
                         FAULT(count_with_gil),
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_C_planted", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C_planted() { return PyModule_Create(&definition); }
