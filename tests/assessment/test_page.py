import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import stochbn
from assessment.conftest import KINDS, classes
from stochbn.assessment import page

HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(2)> $x^ \\ [b]'
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page(HTMLParser):
    """Keeps the tags with what they load, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.loaded, self.ids = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href")]
        self.ids += [value for name, value in attrs if name == "id"]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_is_whole_and_needs_nothing_else(assessed, kind, tmp_path):
    found = assessed(kind)
    assert found.save(tmp_path / "out") == tmp_path / "out" / "index.html"
    text = (tmp_path / "out" / "index.html").read_text("utf-8")
    parsed = Page(text)
    assert all(one.startswith(("#", "data:image/")) for one in parsed.loaded)
    assert "script" not in parsed.tags
    assert "http" not in re.sub(r"data:[^\"]*", "", text)
    links = {one[1:] for one in parsed.loaded if one.startswith("#")}
    assert links <= set(parsed.ids)
    assert len(parsed.ids) == len(set(parsed.ids))
    words = " ".join(parsed.words)
    assert all(sentence in words for sentence in found.verdict)
    assert all(method.label in words for method in found.methods.values())
    assert {"methods", "reliability", "drift", "cost", "next"} <= set(parsed.ids)
    assert ("pictures" in parsed.ids) == (kind in ("classes", "segmentation"))
    assert json.loads((tmp_path / "out" / "assessment.json").read_text()) == json.loads(json.dumps(found.to_dict()))
    assert ((tmp_path / "out" / "abstain.json").exists()) == (kind == "classes")
    if kind == "classes":
        assert stochbn.load_rule(tmp_path / "out" / "abstain.json") == found.rule
        assert "cat → cat" in words


def test_what_was_chosen_is_beside_its_rule(tmp_path):
    """The rule accepts, of predictions made as the page says, what it accepted in the assessment."""
    torch.manual_seed(1)
    model, loaders = classes()
    del loaders["val_loader"]
    found = stochbn.assess(model, **loaders, risk=0.4, num_samples=6, progress=False)
    text = found.save(tmp_path).read_text("utf-8")
    stats, rule = stochbn.load(tmp_path / "chosen.sbn.safetensors"), stochbn.load_rule(tmp_path / "abstain.json")
    x = torch.cat([x for x, _ in loaders["test_loader"]])
    assert rule(stochbn.predict(model, stats, x, num_samples=6)).sum() == found.rule.num_accepted
    assert 'chosen.sbn.safetensors"), x, num_samples=6)' in text
    assert "promises nothing for another method than Last layer, as fitted, nor for another number of draws" in text
    tuning = stochbn.Tuning(spread=None, temperature=1.25)
    text = replace(found, source=tuning).save(tmp_path).read_text("utf-8")
    assert "divided by a temperature of <strong>1.25</strong>" in text
    assert "stochbn.predict(model, stochbn.Tuning(spread=None, temperature=1.25), x)" in text
    with torch.no_grad():
        torch.testing.assert_close(stochbn.predict(model, tuning, x).probs, (model(x) / 1.25).softmax(1))
    assert not (tmp_path / "chosen.sbn.safetensors").exists(), "of the earlier assessment"
    assert "the plain network, which needs no file" in page.render_assessment(replace(found, source=None))


def test_what_comes_from_a_user_is_escaped(assessed):
    found = assessed("classes")
    methods = {key: replace(method, label=HOSTILE) for key, method in found.methods.items()}
    drift = {name: {HOSTILE: (0.1, 0.1)} for name in found.drift}
    hostile = replace(
        found,
        title=HOSTILE,
        class_names=(HOSTILE,) * 3,
        methods=methods,
        drift=drift,
        warned=(HOSTILE,),
        verdict=(HOSTILE,),
        versions={HOSTILE: HOSTILE},
        tunings={key: replace(tuning, verdict=(HOSTILE,)) for key, tuning in found.tunings.items()},
    )
    text = page.render_assessment(hostile)
    assert "<script" not in text
    parsed = Page(text)
    assert all(one.startswith(("#", "data:image/")) for one in parsed.loaded)
    assert HOSTILE in "".join(parsed.words)


def test_figures_show_the_chosen_method_beside_the_plain_network(assessed):
    found = assessed("classes")
    drawn = page.draw_figures(replace(found, chosen="last-tuned"))
    assert set(drawn) == {"reliability", "risk", "entropies", "tuning"}
    labels = [bars.get_label() for bars in drawn["reliability"].axes[0].containers]
    assert labels == ["Plain network", "Last layer, tuned"]
    alone = page.draw_figures(replace(found, chosen="plain"))
    assert [bars.get_label() for bars in alone["reliability"].axes[0].containers] == [
        "Plain network",
        "Last layer, tuned",
    ]


def test_tables_have_what_was_found(assessed):
    found = assessed("classes")
    grid = page.lay_out_scores(found)
    nll = found.methods["sbn"].scores["nll"]
    assert f"{nll.value:.4f} ({nll.low:.4f} to {nll.high:.4f})" in grid.rows[2]
    assert {row for row, _ in grid.bold} == {list(found.methods).index(found.chosen)}
    column = grid.header.index("ECE, %")
    assert grid.rows[2][column] == f"{found.methods['sbn'].scores['ece_percent'].value:.2f}"
    differences = page.lay_out_differences(found)
    assert column not in {place for _, place in differences.bold}
    assert [row[0] for row in differences.rows] == [one.label for one in found.methods.values()][1:]
    assert page.lay_out_drift(found).rows[0][0] in found.drift["train"]
    assert page.lay_out_costs(found).rows[0][1:] == ["1", *page.lay_out_costs(found).rows[0][2:3], "1"]


def test_a_rule_without_a_threshold_accepts_every_input(assessed):
    found = assessed("classes")
    rule = replace(found.rule, threshold=math.inf, num_accepted=112, num_errors=0)
    assert "accept <strong>every input</strong>." in page.render_assessment(replace(found, rule=rule))


def test_an_earlier_page_is_replaced_and_other_files_stay(assessed, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assessed("classes").save(tmp_path)
    assert (tmp_path / "abstain.json").exists()
    assessed("labels").save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["assessment.json", "index.html", "mine.txt"]


def test_nothing_is_half_written(assessed, tmp_path, monkeypatch):
    found = assessed("classes")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"Expected a folder to write the page to, got the file .*file\. Pass another"):
        found.save(tmp_path / "file")
    with pytest.raises(ValueError, match=r"Expected a folder to write the page to, got .*file/deep"):
        found.save(tmp_path / "file" / "deep")

    def fail(*_):
        raise OSError("disk full")

    for name in ("index.html", "assessment.json", "abstain.json", "chosen.sbn.safetensors"):
        (tmp_path / "old" / name).mkdir(parents=True)
        with pytest.raises(ValueError, match=rf"Expected to write the file .*{name}, got a folder of that name"):
            found.save(tmp_path / "old")
        assert [path.name for path in (tmp_path / "old").iterdir()] == [name]
        shutil.rmtree(tmp_path / "old")
    page.check_folder(tmp_path / "not" / "yet" / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

    monkeypatch.setattr(stochbn.AbstainRule, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        found.save(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_the_extra_a_sentence_says_what_to_install():
    script = "import sys; sys.modules['jinja2'] = None; import stochbn.assessment.page"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "Install with pip install 'stochbn[plots]'." in " ".join(ended.stderr.split())


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
@pytest.mark.parametrize("kind", KINDS)
def test_the_page_in_a_browser(assessed, kind, tmp_path):
    """Opens a copy with a script that reports through the title, at two widths and in two schemes."""
    script = (
        "<script>addEventListener('load', () => { const images = [...document.images]; document.title = "
        "`${images.filter(i => i.complete && i.naturalWidth > 0).length - images.length} missing, ` + "
        "`${document.documentElement.scrollWidth <= innerWidth ? 'fits' : 'too wide'}, ` + "
        "`${matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'}`; });</script>"
    )
    text = assessed(kind).save(tmp_path / "out").read_text("utf-8").replace("</body>", f"{script}</body>")
    (tmp_path / "page.html").write_text(text, "utf-8")
    for width, scheme in ((1280, "light"), (400, "dark")):
        ended = subprocess.run(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
                *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"),
                f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
                *("--enable-logging=stderr", "--dump-dom", (tmp_path / "page.html").as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert re.search("<title>(.*?)</title>", ended.stdout)[1] == f"0 missing, fits, {scheme}"
        assert "CONSOLE" not in ended.stderr
