"""`hvdtrain.run`: how functions and answers travel. What the caller has stays as it is, what comes back can be told."""

from __future__ import annotations

import pytest
from function_programs import output


def test_classes_of_the_caller_stay_as_they_are(tmp_path):
    output(
        tmp_path,
        """
        SCALE, SEEN = 1, []
        class Result:
            made = 0
            def __init__(self, value):
                self.value = value
                Result.made += 1
            def scaled(self):
                SEEN.append(self.value)
                return self.value * SCALE
        class Mine(Exception):
            def where(self):
                return SEEN
        def f():
            return [Result(2) for _ in range(5)], Result
        def g():
            raise Mine
        before, method = Result(7), Result.scaled
        results, kind = hvdtrain.run(f, np=1)[0]
        SCALE = 10  # as in a notebook's next cell
        assert kind is Result is type(results[0])
        assert Result.scaled is method and Result.made == 1, Result.made
        assert [results[0].scaled(), before.scaled(), SEEN] == [20, 70, [2, 7]], SEEN
        try:
            hvdtrain.run(g, np=1, output="none")
        except hvdtrain.LauncherError as error:
            assert type(error.__cause__) is Mine and error.__cause__.where() is SEEN
        """,
    )


def test_what_cannot_be_read_by_the_caller_is_told(tmp_path):
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "only_there.py").write_text("class Error(Exception): pass\nclass Answer: pass\n")
    output(
        tmp_path,
        """
        def f(how):
            sys.path.insert(0, "libs")
            import only_there
            if how == "raise":
                raise only_there.Error("at step 7")
            return only_there.Answer()
        class Number:
            def __reduce__(self):
                return int, ("no number",)
        for what, call in (
            ("what rank 0 returned cannot be read here: ModuleNotFoundError: No module", lambda: f("return")),
            ("what it raised cannot be read here: ModuleNotFoundError: No module named", lambda: f("raise")),
            ("Error: at step 7", lambda: f("raise")),
            ("what rank 0 returned cannot be read here: ValueError: invalid literal", Number),
        ):
            try:
                hvdtrain.run(call, np=1, output="none")
            except hvdtrain.LauncherError as error:
                assert what in str(error) and error.__cause__ is None, error
            else:
                raise SystemExit(what)
        """,
    )


def test_what_was_raised_comes_back_whole(tmp_path):
    output(
        tmp_path,
        """
        class Need(Exception):
            def __init__(self, code, where=""):
                super().__init__(code)
                self.where = where
        class Odd(Exception):  # pickle calls it with its args
            def __init__(self, *, where):
                super().__init__(where)
        def need():
            error = Need(3, "here")
            error.add_note("a note")
            raise error
        def raises(error):
            raise error
        def of(function, *args):
            try:
                hvdtrain.run(function, args, np=1, output="none")
            except hvdtrain.LauncherError as error:
                return error.__cause__
        its = of(need)
        assert type(its) is Need and (its.args, its.where, its.__notes__) == ((3,), "here", ["a note"]), repr(its)
        for error in (KeyboardInterrupt(), SystemExit(0)):
            its = of(raises, error)
            assert type(its) is type(error) and its.args == error.args, repr(its)
        def odd():
            raise Odd(where="here")
        assert of(odd) is None
        """,
    )


def test_what_stands_in_the_program_is_found_by_its_name_on_the_rank(tmp_path):
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "beside.py").write_text("VALUE = 5\n")
    output(
        tmp_path,
        """
        import dataclasses, multiprocessing, pickle
        sys.path.remove(os.getcwd())
        sys.path.insert(0, "libs")
        import beside
        @dataclasses.dataclass
        class Config:
            rate: float
        def square(x):
            return x * x
        def f(config):
            with multiprocessing.get_context("fork").Pool(1) as pool:
                squares = pool.map(square, [2, 3])
            return pickle.dumps(config), squares, beside.VALUE
        data, *others = hvdtrain.run(f, (Config(0.5),), np=1)[0]
        assert pickle.loads(data) == Config(0.5)
        assert others == [[4, 9], 5], others
        """,
    )


@pytest.mark.parametrize("cell", [False, True], ids=["script", "cell"])
def test_a_traceback_shows_the_callers_lines(tmp_path, cell):
    text = """
    def user_line():
        from hvdtrain.comm.lines import user_line
        return user_line()  # here
    def fail():
        raise ValueError("x")  # there
    where = hvdtrain.run(user_line, np=1)[0]
    assert where.endswith(": return user_line()  # here"), where
    try:
        hvdtrain.run(fail, np=1, output="none")
    except hvdtrain.LauncherError as error:
        print(error)
    """
    if cell:  # as IPython makes one
        name = "<cell 1>"
        text = "import textwrap\ntext = textwrap.dedent('''" + text + "''')\n"
        text += f"import linecache\nlinecache.cache['{name}'] = len(text), None, text.splitlines(True), '{name}'\n"
        text += f"exec(compile(text, '{name}', 'exec'))"
    said = output(tmp_path, text)
    name = "<cell 1>" if cell else str(tmp_path / "train.py")
    assert f'File "{name}", line {6 if cell else 7}, in fail' in said and 'raise ValueError("x")  # there' in said
    assert "function_rank.py" not in said and "dynamic-code" not in said
